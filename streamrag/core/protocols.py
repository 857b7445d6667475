"""The protocols that sources, modes, backends and tokenizers implement."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from streamrag.core.values import (
    Append,
    BackendEvent,
    Chunk,
    LengthUnit,
    Prompt,
    SamplingParams,
    SourceEvent,
    TokenUsage,
    Update,
)

MAX_NAME_CHARS = 80


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    """The author of the message."""
    text: str
    """The message, as plain text."""


def plain_chat(turns: Sequence[Turn]) -> str:
    """Render a conversation for a model without a chat template.

    >>> plain_chat([Turn("system", "Be brief."), Turn("user", "Hello!")])
    'Be brief.\\n\\nUser: Hello!\\n\\nAssistant:'
    """
    blocks = [turn.text if turn.role == "system" else f"{turn.role.title()}: {turn.text}" for turn in turns]
    return "\n\n".join((*blocks, "Assistant:"))


class Tokenizer(Protocol):
    """The tokenizer of one model. It is called from worker threads, one call at a time."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`, without adding any around them.

        Unless `allow_special`, text that looks like a special token is tokenised as plain text.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, including special tokens."""

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """Render `turns` in the model's chat template, up to where the answer begins.

        For a model without a template, return `plain_chat`, after its beginning-of-text token if it has one.
        """


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model behind a backend."""

    name: str
    """Folder or name of the model, for messages and traces."""
    tokenizer: Tokenizer
    """The model's tokenizer, which makes the prompts."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    is_exact: bool = True
    """Whether the model sees exactly the tokens that are sent."""
    breaks_look_alikes: bool = False
    """Whether text that looks like a special token gets a space inserted, because a server tokenises the text."""
    has_logprobs: bool = True
    """Whether the backend can return log-probabilities."""
    shares_processors: bool = False
    """Whether the model computes on this machine's CPU, which retrieval may need at the same time."""
    verifies_drafts: bool = False
    """Whether the backend verifies the draft of a prompt, in fewer steps than sampling its tokens would take."""
    unit: LengthUnit = "tokens"
    """Unit of the tokenizer's ids, and so of all lengths, `max_model_len` included."""
    min_head_len: int | None = 16
    """Fewest tokens before the context that are sent before the first passage arrives: a block of KV. None if they are
    not to come alone, because the first prompt chooses a replica."""

    def usage(self, num_prompt: int, num_output: int, text: str, counted: TokenUsage | None) -> TokenUsage:
        """Return the backend's own count of an answer, or else the numbers of ids, where these are tokens."""
        if counted is not None:
            return counted
        return TokenUsage(num_prompt if self.unit == "tokens" else None, num_output if num_output or not text else None)


class Source(Protocol):
    """A retriever that streams chunk events. Errors and schedulers use its `name`, or the name of its class."""

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield chunk events as they arrive. The context is complete when the iterator ends.

        :raises SourceError: retrieval failed.
        """


class Mode(Protocol):
    """A rule that turns chunk events into a context."""

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """Return the new context, in prompt order, from the old one and the next event. A pure function."""


class Backend(Protocol):
    """A model that generates tokens: in this process, in processes of its own, or behind a server."""

    @property
    def model(self) -> ModelInfo:
        """The model; available once the backend has started."""

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        """Prefill each prompt as it arrives, and sample the answer to the last one, which is complete.

        Read `prompts` without delay, even while computing. Closing the returned iterator aborts the request.

        :raises BackendError: the engine failed.
        """


async def only(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
    """Yield one prompt, for `Backend.generate`."""
    yield prompt


def part_name(part: object) -> str:
    """Return the name of a source or a backend: its attribute `name` if that is a str, else the name of its class.

    The result is one line of at most 80 characters.

    >>> class Tickets: name = "tickets\\nof 2026"
    >>> part_name(Tickets())
    'tickets of 2026'
    """
    name = getattr(part, "name", None)
    words = "".join(c if c.isprintable() else " " for c in name[: 2 * MAX_NAME_CHARS]) if isinstance(name, str) else ""
    return " ".join(words.split())[:MAX_NAME_CHARS] or type(part).__name__


Progress: TypeAlias = Callable[[str], None]
"""A callback that gets one human-readable line for each step of starting something."""


@runtime_checkable
class Startable(Protocol):
    """A source or backend that holds processes, connections or memory."""

    async def start(self, progress: Progress) -> None:
        """Acquire the resources, and return when queries can be served. Free them again before raising.

        :raises AlreadyStartedError: another owner has started it; `aclose` is not called then.
        """

    async def aclose(self) -> None:
        """Free the resources that `start` acquired. Does nothing when not started."""
