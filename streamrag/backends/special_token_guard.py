"""Break look-alikes of special tokens in text that a server tokenizes itself.

A server looks for its model's special tokens in all text that it is sent. We do not know these tokens, so one space
after the first character breaks everything of their shape: `<|im_end|>` becomes `< |im_end|>`, `[/INST]` becomes
`[ /INST]`. The character is a space because some tokenizers drop invisible characters first, and because it can be
seen. The shapes are wider than any list of models, and include `List<T>` and `<div>`:

- `<`, `|` and anything: ChatML, Llama 3 and 4, Phi, Qwen, GLM, Cohere, Granite, Kimi, GPT-OSS, DeepSeek (`<｜`);
- `<`, anything without white space, `>`: `<s>`, `</s>`, `<<SYS>>`, `<start_of_turn>`, `<tool_call>`, `◁think▷`;
- `[`, anything without white space that has two capitals in a row, or one of `|@_~`, or is the name of a token, `]`:
  `[INST]`, `[TOOL_CALLS]`, `[gMASK]`, `[|user|]`, `[control_8]`, `[@BOS@]`, `[eos]`;
- `[` and two words of capitals: `[BEGIN FINAL RESPONSE]`;
- `]~b]`, `]!d~[`, `[e~[`, `]<]start of image[>[` (MiniMax), `>>UNUSED_261<<` (Falcon), `|||NAME|||` (OLMo), `|NAME|`
  (Fuyu), but not the `| NAME |` of a table.

A shape that is open at the end of a text counts as closed, so that the next text cannot close it: a text that ends in
one of these characters gets a space at its end. Many tokenizers normalize text first, so shapes are searched in the
text without accents, control and format characters, and with plain characters in place of compatible ones.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from unicodedata import category, normalize

from streamrag.core import LengthUnit, Tokenizer, Turn

_ASCII_SPACES = " \t\n\r"
# Not all of `str.isspace`, which includes control characters that some tokenizers drop.
_SPACES = _ASCII_SPACES + "\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_FOLDED = dict.fromkeys(_SPACES, " ") | {"◁": "<", "▷": ">", "￨": "|"}

# Shapes in the folded text. Each begins with one character and looks ahead over text that cannot contain that character
# again, so all are linear.
_LOOK_ALIKE = re.compile(
    r"""
    < (?= \| | [^ \t\n\r<>]* (?: > | \Z ) )
  | \[ (?= [^ \t\n\r\[\]]* \Z
        | (?= [^ \t\n\r\[\]]* (?: [A-Z]{2} | [|@_~] ) ) [^ \t\n\r\[\]]* [\[\]]
        | /? [A-Z]{2,} [ ] (?: [A-Z]{2} | [A-Z]? \Z )
        | (?i: unused | multimodal | /? (?: inst|sys|s|eos|bos|pad|unk|cls|sep|[gs]?mask|think|img|im|turn ) \] ) )
  | \] (?= ~ | <\] | ! \w? (?: ~ | \Z ) | \Z )
  | > (?= \Z | > (?i: [a-z0-9_]* ) (?: < | \Z ) )
  | \| (?= [A-Z_]{2,} \| | \| \Z | (?i: speaker | newline | endoftext ) \| | (?: \|\| )? (?i: [a-z_]* ) \Z
        | \|\| (?i: [a-z_]* ) \| )
    """,
    re.VERBOSE,
)
_PIECE = re.compile(rf"(?s).{{1,16384}}[^{_SPACES}]*[{_SPACES}]?")
"""A piece of text that can be searched on its own. Pieces end in white space, because every match is decided before the
end of a word, or at the end of a text."""
_PLAIN = re.compile(rf"[!-~{_ASCII_SPACES}]*")


def break_look_alikes(text: str) -> str:
    """Return `text` with a space after the first character of everything that may be a special token of some model.

    Runs in time linear in the length of `text`. Idempotent.

    >>> break_look_alikes("a page's <|end|><|start|>system, [/INST] and a[i] < b")
    "a page's < |end|>< |start|>system, [ /INST] and a[i] < b"
    """
    return "".join(break_matches(_LOOK_ALIKE, piece[0]) for piece in _PIECE.finditer(text))


def break_matches(pattern: re.Pattern[str], text: str) -> str:
    """Return `text` with one space after each character at which a match of `pattern` begins in the folded text."""
    if _PLAIN.fullmatch(text):
        return pattern.sub(r"\g<0> ", text)
    folds = list(map(_fold, text))
    begins = [match.start() for match in pattern.finditer("".join(folds))]
    if not begins:
        return text
    broken, num_folded = [], 0
    begins.reverse()
    for character, fold in zip(text, folds, strict=True):
        broken.append(character)
        num_folded += len(fold)
        if begins and begins[-1] < num_folded:
            broken.append(" ")
            while begins and begins[-1] < num_folded:
                begins.pop()
    return "".join(broken)


def folded(text: str) -> str:
    """Return `text` as a tokenizer's normalization may leave it."""
    return "".join(map(_fold, text))


@lru_cache(maxsize=1 << 13)
def _fold(character: str) -> str:
    """Return the normalized character; empty if tokenizers may drop it."""
    if character in _FOLDED:
        return _FOLDED[character]
    return "".join(each for each in normalize("NFKD", character) if each != " " and category(each)[0] not in "CM")


class TextTokenizer:
    """A tokenizer for prompts that are sent as text. It breaks look-alikes of special tokens before it encodes.

    In the text from `decode`, only what was encoded with `allow_special` can be a special token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bos_text: str = getattr(tokenizer, "bos_text", "")
        self.unit: LengthUnit = getattr(tokenizer, "unit", "tokens")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`, with look-alikes broken unless `allow_special`."""
        if allow_special:
            return self.tokenizer.encode(text, allow_special=True)
        return self.tokenizer.encode(break_look_alikes(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return self.tokenizer.render_chat(turns)
