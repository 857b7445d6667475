"""A bound on the text that is tokenised, whatever is asked or retrieved."""

from collections.abc import Callable

from streamrag.core import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""Most kinds of text have fewer; code with much white space has more."""


def encode_at_most(tokenizer: Tokenizer, text: str, max_tokens: int, written: Callable[[str], str] = str) -> list[int]:
    """The token ids of `text`, or if it surely has more than `max_tokens`, of a beginning that has more.

    Cutting a text changes only the tokens at the cut. So a text whose beginning has a quarter more tokens than can be
    used is never tokenised whole, nor `written` as the prompt has it, and takes no more time and memory than that
    beginning.
    """
    num_characters = CHARACTERS_PER_TOKEN * max_tokens
    while 0 < num_characters < len(text):
        token_ids = tokenizer.encode(written(text[:num_characters]))
        if len(token_ids) > max_tokens * 5 // 4:
            return token_ids
        num_characters *= 2
    return tokenizer.encode(written(text))
