"""The prompt of a conversation with tools, rendered by the model's chat template.

    | tools, system text, earlier messages | passages | question | later messages: calls and results |

Definitions, arguments and results come from clients and tools, and must not become special tokens. So each text in them
is replaced before rendering, and tokenised by itself. The quotation mark in a replacement shows whether the template
prints it as JSON: only there it is escaped.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from streamrag.backends.tokenizer import HuggingFaceTokenizer, fold_system
from streamrag.core import Tokenizer, Turn
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.modes.bounds import encode_bounded

Message: TypeAlias = Mapping[str, Any]
"""A message in OpenAI's form, whose content is a text and whose calls have objects as arguments."""

MAX_TEXTS = 4096
"""Different texts in tools and messages. Each takes about 20 us to tokenise, however short it is."""

_TEXT = re.compile(r'@@streamrag-text-(\d+)(\\*)"@@')
_LINE = re.compile(r"@@streamrag-line-(\d+)@@")
_WORD = re.compile(r"[\w.$/-]{0,64}", re.ASCII)
"""A text that is not replaced: templates compare names and types."""
_VISIBLE = re.compile(r"|\s*</?[\w|]+>\s*|.*@@streamrag-\d+@@.*")
"""A line that no passage may imitate: a tag. It may also have the text of a turn."""


def with_tools(
    base: PromptTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, str, PromptTemplate]:
    """Return the leading system texts, joined, the last user's message as the question, and a template.

    The template is `base`, with the tools and the messages before the question in front, the later ones at the end.

    :raises ConfigurationError: the last message is neither a user's nor a tool's, or none is a user's.
    """
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] not in ("user", "tool"):
        raise ConfigurationError("the last message must be a user's (a human message), or a tool's result behind one")
    place = len(roles) - 1 - roles[::-1].index("user")
    num_system = next(i for i, role in enumerate(roles) if role != "system")
    system = "\n\n".join(message["content"] for message in messages[:num_system])
    wrap = partial(ToolTokenizer, tools, messages[num_system:place], messages[place + 1 :])
    return system, messages[place]["content"], replace(base, wrap_tokenizer=wrap)


def model_tokenizer(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """Return `tokenizer` or what it wraps; ConfigurationError if that is no model's or has no chat template."""
    found = getattr(tokenizer, "tokenizer", tokenizer)
    if not isinstance(found, HuggingFaceTokenizer) or not found.whole.chat_template:
        raise ConfigurationError(
            "there is no chat template for tools: the model needs one, and a model on a server its tokenizer here, as "
            "OpenAIBackend(url, tokenizer=...), or model.tokenizer in a service's settings"
        )
    return found


class ToolTokenizer:
    """The tokenizer of one query with tools."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        earlier: Sequence[Message],
        later: Sequence[Message],
        tokenizer: Tokenizer,
        max_model_len: int,
    ) -> None:
        self._tools = tools
        self._earlier = earlier
        self._later = later
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._texts: dict[str, int] = {}
        self._lines: list[str] = []
        self._special: list[str] = []  # added tokens that are words

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`. `allow_special` puts back the lines and texts that `render_chat` replaced.

        The texts become plain text, escaped where they are in JSON. After `max_model_len` tokens the rest may be cut.
        """
        if not allow_special:
            return self._tokenizer.encode(text)
        first, *others = _TEXT.split(_LINE.sub(lambda line: self._lines[int(line[1])], text))
        token_ids = self._tokenizer.encode(first, allow_special=True)
        texts = list(self._texts)
        known: dict[str, list[int]] = {}
        for number, slashes, piece in zip(others[::3], others[1::3], others[2::3], strict=True):
            replaced = texts[int(number)]
            for _ in range(len(slashes).bit_length()):  # JSON has one, and JSON in JSON three
                replaced = json.dumps(replaced, ensure_ascii=False)[1:-1]
            if replaced not in known:
                known[replaced] = encode_bounded(self._tokenizer, replaced, self._max_model_len)
            token_ids += [*known[replaced], *self._tokenizer.encode(piece, allow_special=True)]
            if len(token_ids) > self._max_model_len:
                break  # too long already
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`."""
        return self._tokenizer.decode(token_ids)

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """Return `turns` with tools and messages in the chat template, most lines as placeholders for `encode`.

        Only tags, and lines that are there without tools too, are visible. No passage may imitate a line of this text,
        but one that is code may have a line of a schema.

        :raises ConfigurationError: the template refuses these or leaves out tools, or there are too many texts.
        """
        model = model_tokenizer(self._tokenizer)
        self._special = [token for token in model.whole.get_added_vocab() if token and _WORD.fullmatch(token)]
        num_system = next(i for i, turn in enumerate(turns) if turn.role != "system")
        own = [{"role": turn.role, "content": turn.text} for turn in turns]
        earlier, later, tools = map(self._replaced, (self._earlier, self._later, self._tools))
        if len(self._texts) > MAX_TEXTS:
            raise ConfigurationError(f"tools and messages have more than {MAX_TEXTS:,} texts: give fewer tools")
        messages = [*own[:num_system], *earlier, *own[num_system:], *later]
        if messages[0]["role"] == "system" and not model.keeps_system(tools=tools[:1]):
            messages = fold_system(messages)
        try:
            rendered = model.render(messages, tools)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the model's chat template refuses these messages or tools: {error}") from error
        names = [each["function"]["name"] for each in tools]
        if lost := [name for name in names if name.rstrip('"@') not in rendered]:
            raise ConfigurationError(f"the model's chat template leaves out tools, such as {lost[0]}: use another")
        without = set(self._tokenizer.render_chat(turns).split("\n"))
        self._lines = rendered.split("\n")
        return "\n".join(
            line if line in without or _VISIBLE.fullmatch(line) else f"@@streamrag-line-{number}@@"
            for number, line in enumerate(self._lines)
        )

    def _replaced(self, value: Any) -> Any:
        """Return `value` with a numbered placeholder for each text and name in it that is not a plain word."""
        if isinstance(value, str):
            if _WORD.fullmatch(value) and not any(token in value for token in self._special):
                return value
            return f'@@streamrag-text-{self._texts.setdefault(value, len(self._texts))}"@@'
        if isinstance(value, Mapping):
            return {self._replaced(name): self._replaced(each) for name, each in value.items()}
        return list(map(self._replaced, value)) if isinstance(value, list | tuple) else value
