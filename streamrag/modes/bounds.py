"""Bound the work of tokenising a text of any length."""

from collections.abc import Callable

from streamrag.core import Tokenizer

CHARACTERS_PER_TOKEN = 8  # an upper bound for most texts; code with much white space has more


def encode_bounded(
    tokenizer: Tokenizer, text: str, max_tokens: int, format_text: Callable[[str], str] = str
) -> list[int]:
    """Return the token ids of the formatted `text`, or of its beginning if that has over 5/4 of `max_tokens` ids.

    Truncation changes only the tokens at the cut. So only the beginning of a long text is formatted and tokenised, and
    twice as much again while that has too few ids.
    """
    num_characters = CHARACTERS_PER_TOKEN * max_tokens
    while 0 < num_characters < len(text):
        token_ids = tokenizer.encode(format_text(text[:num_characters]))
        if len(token_ids) > max_tokens * 5 // 4:
            return token_ids
        num_characters *= 2
    return tokenizer.encode(format_text(text))
