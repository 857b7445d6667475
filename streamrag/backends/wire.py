"""How a chunk travels to the scheduler: through `SamplingParams.extra_args`, which vLLM passes on as it is.

old prompt:   k k k k k o o o          The request carries only the tail; the scheduler keeps the first
new prompt:   k k k k k n n            `num_kept` tokens that it has, and finds out how many more are equal.
              └─ num_kept ┘ tail
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KEY", "ChunkMessage", "EndOfInput", "decode"]

KEY = "streamrag"


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """What the scheduler must know of a chunk beside its tokens."""

    index: int
    """Number of the chunk within its stream, from 0."""
    num_kept: int
    """Leading tokens of the previous prompt that the new one keeps, at least; the tokens of the request follow them."""
    is_final: bool
    """Whether the prompt is complete: sample the answer."""
    arrival_s: float | None = None
    """When the chunk arrived, on `time.monotonic` of this host; None if the client runs on another."""
    expected_complete_s: float | None = None
    """When the retriever expects the prompt to be complete, on the same clock."""
    source: str = ""
    """What kind of retriever the chunk comes from: those of one kind are expected to behave alike."""

    def extra_args(self) -> dict[str, Any]:
        return {KEY: asdict(self)}


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """What vLLM's client sends by itself when the stream of inputs ends: there are no more chunks."""

    def extra_args(self) -> dict[str, Any]:
        return {KEY: {}}


def decode(extra_args: Mapping[str, Any] | None) -> ChunkMessage | EndOfInput | None:
    """What `extra_args` say; None for a plain request."""
    fields = (extra_args or {}).get(KEY)
    if fields is None:
        return None
    return ChunkMessage(**fields) if fields else EndOfInput()
