"""Text that a server tokenises by itself, such that nothing in it can become a special token there.

A server looks for its model's special tokens in all text that it is sent. Which these are is not known here, so all
that has their shape is broken by one space behind its first character: `<|im_end|>` becomes `< |im_end|>`, `[/INST]`
becomes `[ /INST]`. A space, because some tokenizers drop invisible characters before they look, and because it can be
seen. The shapes are wider than any list of models, and catch `List<T>` and `<div>` too:

- `<`, `|` and anything: ChatML, Llama 3 and 4, Phi, Qwen, GLM, Cohere, Granite, Kimi, GPT-OSS, DeepSeek (`<｜`);
- `<`, anything without white space, `>`: `<s>`, `</s>`, `<<SYS>>`, `<start_of_turn>`, `<tool_call>`, `<turn|>`;
- `[`, anything without white space that has two capitals in a row, or one of `|@_~`, or is the name of a token, `]`:
  `[INST]`, `[TOOL_CALLS]`, `[gMASK]`, `[|user|]`, `[control_8]`, `[@BOS@]`;
- `]~b]`, `]!d~[`, `[e~[` (MiniMax), `>>QUESTION<<` (Falcon), `|||NAME|||` (OLMo).

What is still open at the end of a text counts as closed, so that the next text cannot close it, and a text that ends in
one of these characters gets a space at its end. Tokenizers that fold
compatibility characters read `＜` and `［` as `<` and `[`; so does this.
"""

import re
from collections.abc import Sequence

from streamrag.core import Tokenizer, Turn

__all__ = ["TextTokenizer", "break_look_alikes"]

# Not `\s`, which has control characters that some tokenizers drop.
_SPACE = " \\t\\n\\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LESS, _GREATER, _BAR = "<＜﹤", ">＞﹥", "|｜￨"
_DROPPED = rf"[^\x20-\x7e{_SPACE}{_LESS}{_GREATER}{_BAR}［］]*"
"""What some tokenizers drop before they look: control and format characters, accents. Here, all but ASCII."""

# Each begins with one character and looks ahead over what cannot hold that character again, so that all are linear.
_IN_ANGLES = rf"[^{_SPACE}{_LESS}{_GREATER}]*"
_IN_BRACKETS = rf"[^{_SPACE}\[\]［］]*"
_LOOK_ALIKE = re.compile(
    rf"""
    [{_LESS}] (?= {_DROPPED} [{_BAR}] | {_IN_ANGLES} (?: [{_GREATER}] | \Z ) )
  | [\[［] (?= {_IN_BRACKETS} \Z
        | (?= {_IN_BRACKETS} (?: [A-ZＡ-Ｚ]{_DROPPED}[A-ZＡ-Ｚ] | [{_BAR}@_~] ) ) {_IN_BRACKETS} [\[\]［］]
        | {_DROPPED} (?: unused | multimodal ) )
  | [\]］] (?= {_DROPPED} (?: ~ | ! \w? (?: ~ | \Z ) | \Z ) )
  | > (?= \Z | > [A-Z_]* (?: < | \Z ) )
  | [|｜] (?= [|｜]? \Z | [|｜]{{2}} [A-Z_]* (?: [|｜] | \Z ) )
    """,
    re.VERBOSE,
)
_PIECE = re.compile(rf"(?s).{{1,16384}}[^{_SPACE}]*[{_SPACE}]?")
"""No look-alike has white space in it; so a piece that ends in some can be searched alone, and others run between."""


def break_look_alikes(text: str) -> str:
    """`text` with a space behind the first character of whatever may be a special token of some model.

    Takes time linear in the length of `text`, and changes nothing that it has changed before.

    >>> break_look_alikes("a page's <|end|><|start|>system, [/INST] and a[i] < b")
    "a page's < |end|>< |start|>system, [ /INST] and a[i] < b"
    """
    return "".join(_LOOK_ALIKE.sub(r"\g<0> ", piece[0]) for piece in _PIECE.finditer(text))


class TextTokenizer:
    """A tokenizer for prompts that are sent as text: look-alikes of special tokens are broken before they are encoded.

    So `decode` gives a text in which only what was encoded with `allow_special` can be a special token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_text: str = getattr(tokenizer, "bos_text", "")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, look-alikes broken; with `allow_special`, of `text` as it is."""
        if allow_special:
            return self._tokenizer.encode(text, allow_special=True)
        return self._tokenizer.encode(break_look_alikes(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return self._tokenizer.decode(token_ids)

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """`turns` in the chat template of the tokenizer."""
        return self._tokenizer.render_chat(turns)
