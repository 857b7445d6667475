"""The seams: what a source, a mode, a backend and a tokenizer must be able to do."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from streamrag.core.answers import BackendEvent, SamplingParams
from streamrag.core.context import Append, Chunk, SourceEvent, Update
from streamrag.core.prompts import Prompt

MAX_NAME_CHARS = 80


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


def plain_chat(turns: Sequence[Turn]) -> str:
    """A conversation for models that have no chat template.

    >>> plain_chat([Turn("system", "Be brief."), Turn("user", "Hello!")])
    'Be brief.\\n\\nUser: Hello!\\n\\nAssistant:'
    """
    blocks = [turn.text if turn.role == "system" else f"{turn.role.title()}: {turn.text}" for turn in turns]
    return "\n\n".join((*blocks, "Assistant:"))


class Tokenizer(Protocol):
    """Text to token ids and back, for one model. Called from worker threads, one call at a time."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, nothing added around them.

        Without `allow_special`, look-alikes of special tokens are tokenised as the text they are.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """`turns` in the model's chat template, up to where the answer begins.

        A model without a template gets `plain_chat`, behind its beginning-of-text token if it wants one.
        """


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts that a pipeline must know about the model behind a backend."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    """The most tokens that prompt and answer may have together."""
    is_exact: bool = True
    """Whether the tokens that are sent are the tokens that the model sees."""
    breaks_look_alikes: bool = False
    """Whether look-alikes of special tokens in text are broken by a space, because a server tokenises that text."""


class Source(Protocol):
    """A retriever, as a stream of chunk events. Errors and schedulers use its `name`, or else the name of its class."""

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Chunk events as they arrive; the context is complete when the iterator ends.

        :raises SourceError: when retrieval fails.
        """


class Mode(Protocol):
    """A rule by which chunk events become a context."""

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order, given the old one and the next event. A pure function."""


class Backend(Protocol):
    """A model that generates tokens: in this process, in processes of its own, or behind a server."""

    @property
    def model(self) -> ModelInfo:
        """The model; available once the backend has started."""

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        """Prefill each prompt as it comes; sample the answer to the complete one, which is the last.

        `prompts` is read without delay, whatever is being computed. Closing the iterator aborts the request.

        :raises BackendError: when the engine fails.
        """


def part_name(part: object) -> str:
    """The name of a source or a backend: its attribute `name` if that is a str, else the name of its class.

    The result is one line of at most 80 characters, whatever the attribute holds.

    >>> class Tickets: name = "tickets\\nof 2026"
    >>> part_name(Tickets())
    'tickets of 2026'
    """
    name = getattr(part, "name", None)
    words = "".join(c if c.isprintable() else " " for c in name[: 2 * MAX_NAME_CHARS]) if isinstance(name, str) else ""
    return " ".join(words.split())[:MAX_NAME_CHARS] or type(part).__name__


Progress: TypeAlias = Callable[[str], None]
"""Called with one line for a person whenever starting something reaches a new step."""


@runtime_checkable
class Startable(Protocol):
    """A source or backend that holds processes, connections or memory."""

    async def start(self, progress: Progress) -> None:
        """Acquire them; return when queries can be served. Must free what it took if it raises.

        :raises AlreadyStartedError: another owner has started it; `aclose` is not called then.
        """

    async def aclose(self) -> None:
        """Free the resources that `start` took. Does nothing when not started."""
