"""The messages between the caller of a query and the replica that answers it.

    caller                                                    replica
    Open(first prompt, params)       ── once, routed ──▶      a stream of its engine
    Delta(2), Delta(3) ... complete  ── to that replica ──▶   the stream's next prompts
                                     ◀── tuples of ──         Opened, Prefilled, AnswerChunk ... or Refused, or Failed

Each prompt is sent as the length of its prefix shared with the last one sent, and the tail of new tokens.
"""

from array import array
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import streamrag.errors
from streamrag.core import BackendEvent, Prompt, SamplingParams
from streamrag.errors import BackendError, MissingDependencyError, StreamRagError
from streamrag.support.messages import message_of


@dataclass(frozen=True, slots=True)
class Delta:
    """A prompt, as the difference from the previous one in the same stream."""

    number: int  # number of the prompt in its stream, from 1. A repeated number changes nothing.
    num_shared: int  # leading tokens that are unchanged
    tail: bytes  # the tokens after them, four bytes each
    draft: bytes  # tokens that the answer may repeat, four bytes each
    options: Prompt  # the prompt without its tokens

    @classmethod
    def of(cls, prompt: Prompt, *, number: int, num_shared: int) -> "Delta":
        """Return `prompt` as a difference, without its first `num_shared` tokens."""
        tail, draft = (array("I", ids).tobytes() for ids in (prompt.token_ids[num_shared:], prompt.draft))
        return cls(number, num_shared, tail, draft, replace(prompt, token_ids=(), num_shared=0, draft=()))

    def apply_to(self, token_ids: tuple[int, ...]) -> Prompt:
        """Return the prompt that follows a prompt of `token_ids`."""
        whole = (*token_ids[: self.num_shared], *array("I", self.tail))
        draft = tuple(array("I", self.draft))
        return replace(self.options, token_ids=whole, num_shared=self.num_shared, draft=draft)


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a stream in a replica."""

    stream_id: str
    first: Delta
    params: SamplingParams
    caller_id: str
    ticket: Any = None
    """The `Ticket` that chooses the replica. Not sent: only the router in the caller's process needs it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Open, (self.stream_id, self.first, self.params, self.caller_id)


@dataclass(frozen=True, slots=True)
class Opened:
    """The replica has accepted the stream, and accepts its next prompts."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has no room for the stream."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream ended with one of our errors. Exceptions themselves cannot be sent reliably."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: StreamRagError) -> "Failed":
        return cls(type(error).__name__, message_of(error))

    def to_error(self) -> StreamRagError:
        """Return an error of the same type; a BackendError if the type is unknown or not made from a message."""
        kind = ERROR_TYPES.get(self.kind, BackendError)
        return BackendError(self.message) if kind is MissingDependencyError else kind(self.message)


ERROR_TYPES = {
    n: kind for n, kind in vars(streamrag.errors).items() if isinstance(kind, type) and issubclass(kind, StreamRagError)
}

WireEvent: TypeAlias = Opened | Refused | Failed | BackendEvent
