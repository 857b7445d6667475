"""How much text is tokenised at most, whatever is asked or retrieved."""

from collections.abc import Callable

from streamrag.core import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""More than text of most kinds has; code with much white space has more."""


def encode_at_most(tokenizer: Tokenizer, text: str, max_tokens: int, written: Callable[[str], str] = str) -> list[int]:
    """The token ids of `text`; if it surely has more than `max_tokens`, only those of its beginning, which are more.

    How a text is cut changes the tokens at the cut alone. So one whose beginning has a quarter more tokens than can be
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
