"""What may happen to an engine in the fuzz: each is something that a client, an operator or a machine does."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "Abort",
    "Chunk",
    "EndOfInput",
    "Event",
    "Evict",
    "Grammar",
    "Lost",
    "Malformed",
    "Pause",
    "Plain",
    "Reset",
    "Resume",
    "Session",
]


@dataclass(frozen=True, slots=True)
class Plain:
    """A request whose prompt is complete."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: int | None = None
    has_grammar: bool = False
    """Whether its answer is constrained by a grammar, which is not ready before a `Grammar` says so."""
    has_prompt_logprobs: bool = False
    """Whether its client wants the log-probabilities of its prompt."""


@dataclass(frozen=True, slots=True)
class Session:
    """A request of vLLM's own streaming sessions, which is refused."""

    request_id: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of a complete prompt is compiled, or cannot be."""

    request_id: str
    is_good: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next prompt of a stream."""

    request_id: str
    index: int
    prompt: tuple[int, ...]
    num_kept: int
    """Tokens kept from the prompt before, as the client says; the true LCP may be longer."""
    is_complete: bool
    max_tokens: int
    stop: int | None = None
    has_grammar: bool = False
    """As of `Plain`, if it is the last chunk; that of another chunk is never waited for."""
    draft: tuple[int, ...] = ()
    """What its client takes for the answer, or for a part of it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A chunk that its client takes for sent, but that never arrives. Others follow."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request, or a chunk of a stream that lives, whose `extra_args["streamrag"]` are nonsense."""

    request_id: str
    extra_args: Any
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The client of a stream has no more chunks; perhaps it gives up."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The client goes away; perhaps while a step computes, of which vLLM hears before it takes in the step's output."""

    request_id: str
    is_in_mid_step: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Somebody, the `nth` of those who hold KV, loses it for no reason."""

    nth: int


@dataclass(frozen=True, slots=True)
class Reset:
    """New weights are loaded, and the prefix cache is emptied, perhaps only if nobody holds KV."""

    is_of_running: bool = True
    is_of_connector: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """`pause_generation`. When it has returned and the cache is cleared, new weights are loaded."""

    mode: Literal["abort", "wait", "keep"]
    clears_cache: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """`resume_generation`."""


Event: TypeAlias = (
    Plain | Session | Grammar | Chunk | Lost | Malformed | EndOfInput | Abort | Evict | Reset | Pause | Resume
)
