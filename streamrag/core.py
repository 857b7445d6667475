"""The values that travel through a query, and the protocols at the seams.

    query ──Source──▶ Append | Update | Skipped | CutShort ──Mode──▶ Prompt ──Backend──▶ Prefilled | AnswerChunk

Every value here is immutable. A program that brings its own retrieval implements `Source`; one that brings its own
engine implements `Backend`; one that orders contexts in its own way implements `Mode`.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord
from streamrag.support.messages import is_number, is_whole, short

MAX_NAME_CHARS = 80

MAX_STOP_TEXTS, MAX_STOP_CHARS = 16, 256
"""Each text is searched for at every token, in the event loop: these take 10 us, and 100,000 texts took 15 ms. As many
characters of the answer are held back. OpenAI takes 4 texts; vLLM has no limit."""

MAX_INT = (1 << 31) - 1


# ---------------------------------------------------------------------------------------------- what sources yield


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage of retrieved text, and where it came from.

    Two chunks with the same `uri` and `passage` are the same place; two equal chunks are also the same text.
    """

    text: str
    uri: str
    """URL, or path of the document."""
    title: str = ""
    passage: int = 0
    """Number of the passage within its document, from 0."""
    score: float | None = None
    """The retriever's own score; larger is better."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a retriever expects still to come. Schedulers may use it, correctness never depends on it."""

    num_chunks: int | None = None
    """Chunk events still to come after this one."""
    end_s: float | None = None
    """Seconds from this event until retrieval is expected to end."""


@dataclass(frozen=True, slots=True)
class Append:
    """The context grows by one chunk, at its end."""

    chunk: Chunk
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The context is replaced by these chunks, in prompt order."""

    chunks: tuple[Chunk, ...]
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that retrieval could not use: an unreachable page, a wrong type, a limit that was met."""

    uri: str
    reason: str


@dataclass(frozen=True, slots=True)
class CutShort:
    """Retrieval ends before it is done: its time is up, or others kept busy what it needs.

    What was found is good, but what was not found may exist all the same.
    """

    reason: str


SourceEvent: TypeAlias = Append | Update | Skipped | CutShort


# -------------------------------------------------------------------------------------------- what backends consume


def common_prefix_len(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Number of leading items that `a` and `b` share, their LCP, given that they share the first `start`.

    Compares slices, in C: about 30 us for 7,000 tokens. Both must be of the same type, list or tuple.

    >>> common_prefix_len((1, 2, 3, 4), (1, 2, 7, 4))
    2
    """
    shared, end = start, min(len(a), len(b))
    if a[shared:end] == b[shared:end]:
        return end
    # Invariant: [0, shared) is equal, [0, end) is not.
    while end - shared > 1:
        middle = (shared + end) // 2
        if a[shared:middle] == b[shared:middle]:
            shared = middle
        else:
            end = middle
    return shared


RequestClass: TypeAlias = Literal["session", "pool", "stream"]
"""Who waits for a request, the most urgent class first: a question of a session, any other query, and nobody, for a
session's data. Source: arXiv 2605.13784, section 3.6, where watched questions are a class before all others."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the model. Until `is_complete`, more will follow: compute its KV, but sample nothing."""

    token_ids: tuple[int, ...]
    num_shared: int
    """Leading tokens equal to those of the query's previous prompt: their LCP. 0 for the first."""
    is_complete: bool
    hint: Hint | None = None
    """What the retriever expects still to come."""
    source_name: str = ""
    """The `part_name` of the retriever that it comes from. Retrievers of the same name are expected to behave alike."""
    request_class: RequestClass = "pool"
    """Who waits for it. The engine's policy may use it; of a query's prompts the first one's counts."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_shared <= len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the answer. The defaults are greedy.

    Raises ConfigurationError for a value that no engine accepts.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 considers all tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the engine unchanged, for parameters that streamrag does not name."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        checks = {
            "max_tokens": (is_whole(self.max_tokens) and 1 <= self.max_tokens <= MAX_INT, "a whole number, at least 1"),
            "temperature": (is_number(self.temperature) and 0 <= self.temperature < inf, "a number, at least 0"),
            "top_p": (is_number(self.top_p) and 0 < self.top_p <= 1, "a number over 0 and at most 1"),
            "top_k": (is_whole(self.top_k) and 0 <= self.top_k <= MAX_INT, "a whole number, at least 0"),
            "seed": (self.seed is None or (is_whole(self.seed) and abs(self.seed) < 1 << 63), "a whole number or None"),
            "stop": (
                isinstance(self.stop, tuple)
                and len(self.stop) <= MAX_STOP_TEXTS
                and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in self.stop),
                f'a tuple of texts, as in stop=("END",): at most {MAX_STOP_TEXTS}, of {MAX_STOP_CHARS} characters each',
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "extra": (isinstance(self.extra, Mapping), "a mapping from names to values"),
        }
        for name, (is_valid, remedy) in checks.items():
            if not is_valid:
                raise ConfigurationError(f"SamplingParams: {name}={short(getattr(self, name))} must be {remedy}")
        for name, plain in (("max_tokens", int), ("temperature", float), ("top_p", float), ("top_k", int)):
            object.__setattr__(self, name, plain(getattr(self, name)))  # NumPy's numbers become Python's
        if self.seed is not None:
            object.__setattr__(self, "seed", int(self.seed))


# ---------------------------------------------------------------------------------------------- what backends yield


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The backend has computed the KV of at least this many leading tokens of the query's newest prompt."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """New text of the answer, with the tokens it was decoded from.

    `text` may be empty while a character is incomplete. `finish_reason` is set on the last chunk only.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    record: RequestRecord | None = None
    """What the engine did with the request; on the last chunk only, and None if the engine keeps no records."""
    logprobs: Any = None
    """As the engine has them, one entry per token, if `SamplingParams.extra` asks for them."""


BackendEvent: TypeAlias = Prefilled | AnswerChunk


# ------------------------------------------------------------------------------------------------------- the seams


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

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
    """What a pipeline must know about the model behind a backend."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    """The most tokens that prompt and answer may have together."""
    is_exact: bool = True
    """Whether the tokens that are sent are the tokens that the model sees."""
    breaks_look_alikes: bool = False
    """Whether look-alikes of special tokens in text are broken by a space, because a server tokenises that text."""


class Source(Protocol):
    """A retriever. It may have a `name` for errors and schedulers; else they use the name of its class."""

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Chunk events as they arrive; the context is complete when the iterator ends.

        :raises SourceError: when retrieval fails.
        """


class Mode(Protocol):
    """How chunk events become a context."""

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """The new context, in prompt order, given the old one and the next event. A pure function."""


class Backend(Protocol):
    """Where tokens come from."""

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
        """Free them. Does nothing when not started."""
