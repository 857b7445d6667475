"""What travels between whoever has the query and the replica that answers it.

    caller                                                    replica
    Open(first prompt, params)       ── once, routed ──▶      a stream of its engine
    Delta(2), Delta(3) ... complete  ── to that replica ──▶   the stream's next prompts
                                     ◀── tuples of ──         Opened, Prefilled, AnswerChunk ... or Refused, or Failed

Each prompt goes as what it shares with the last one sent and a tail of new tokens.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from streamrag.core import BackendEvent, Hint, Prompt, RequestClass, SamplingParams
from streamrag.errors import BackendError, MissingDependencyError, StreamRagError
from streamrag.support.messages import message_of


@dataclass(frozen=True, slots=True)
class Delta:
    """A prompt, told by what it changes in the one before it in the same stream."""

    number: int
    """Of the stream's prompts, from 1. One that comes a second time changes nothing."""
    num_shared: int
    """Tokens that stay."""
    tail: bytes
    """Those behind them, four bytes each."""
    is_complete: bool
    hint: Hint | None = None
    source_name: str = ""
    request_class: RequestClass = "pool"

    @classmethod
    def of(cls, prompt: Prompt, *, number: int, num_shared: int) -> "Delta":
        tail = array("I", prompt.token_ids[num_shared:]).tobytes()
        told = prompt.is_complete, prompt.hint, prompt.source_name, prompt.request_class
        return cls(number, num_shared, tail, *told)

    def after(self, token_ids: tuple[int, ...]) -> Prompt:
        """The prompt, where the last one had `token_ids`."""
        tail = array("I")
        tail.frombytes(self.tail)
        whole = (*token_ids[: self.num_shared], *tail)
        told = self.is_complete, self.hint, self.source_name, self.request_class
        return Prompt(whole, self.num_shared, *told)


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a stream in a replica."""

    stream_id: str
    first: Delta
    params: SamplingParams
    caller_id: str
    ticket: Any = None
    """Who chooses the replica. Stays in the caller's process: the router there finds it in the call's arguments."""

    @property
    def prompt(self) -> str:
        """The first prompt, a character a token: what Ray's own routers read of a call."""
        return "".join(chr(token_id % 0xD800) for token_id in self.first.after(()).token_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return Open, (self.stream_id, self.first, self.params, self.caller_id)


@dataclass(frozen=True, slots=True)
class Opened:
    """The replica has the stream, and takes its next prompts."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has as many streams as it takes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream ended with an error of ours. Exceptions themselves do not survive a journey."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: StreamRagError) -> "Failed":
        return cls(type(error).__name__, message_of(error))

    def error(self) -> StreamRagError:
        """The error again. One that is made of other values than a message becomes a BackendError."""
        kind = KINDS.get(self.kind, BackendError)
        return BackendError(self.message) if kind is MissingDependencyError else kind(self.message)


def _kinds(kind: type[StreamRagError]) -> Iterator[type[StreamRagError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


KINDS = {kind.__name__: kind for kind in _kinds(StreamRagError) if kind.__module__ == StreamRagError.__module__}


WireEvent: TypeAlias = Opened | Refused | Failed | BackendEvent
