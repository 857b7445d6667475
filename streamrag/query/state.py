"""The state of one query that runs, which the parts that run it share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streamrag.core import AnswerChunk, Append, Backend, Chunk, Mode, Update, part_name
from streamrag.core.retrieval import Retrieval
from streamrag.errors import ConfigurationError, SourceError
from streamrag.modes import AssembledPrompt
from streamrag.query.answer_stream import Emit
from streamrag.query.overlap import NEVER
from streamrag.support.clock import Clock
from streamrag.telemetry import OverlapChoice, Stretch

if TYPE_CHECKING:
    from streamrag.trace.recorder import TraceRecorder


class NewContext(NamedTuple):
    """A complete prompt with new passages, which were retrieved for `query`, behind those of the prompt before."""

    query: str
    step: AssembledPrompt
    num_shared: int
    """Leading tokens that it shares with the prompt before."""

    def num_recomputed(self, num_answer_tokens: int) -> int:
        """Return the number of tokens behind those whose KV stays valid, the answer so far included."""
        return len(self.step.prompt.token_ids) - self.num_shared + num_answer_tokens


@dataclass(slots=True)
class QueryState:
    """The parts that a query uses, and what has happened to it so far. Times are seconds since it was submitted."""

    retrieval: Retrieval
    backend: Backend
    mode: Mode
    emit: Emit
    clock: Clock
    submitted_s: float
    """Time of submission, on `clock`."""
    recorder: "TraceRecorder | None"
    answers_despite_source_error: bool
    overlap: OverlapChoice = NEVER
    """The partial prompts that are sent; with "auto", chosen after admission."""
    queued_s: float = 0.0
    """Time at which the query was admitted."""
    has_forecast: bool = False
    """Whether the source said when it would end."""
    first_chunk_s: float | None = None
    retrieval_s: float | None = None
    """Time at which retrieval ended; None before."""
    source_error: SourceError | None = None
    cut_short: str | None = None
    complete: AssembledPrompt | None = None
    """The complete prompt, once it was reported; with retrieval in mid-answer, the newest one."""
    first_complete: AssembledPrompt | None = None
    """The one that the answer began with."""
    num_invalidated: int = 0
    stretches: tuple[Stretch, ...] = ()
    """The stretches of the answer so far: one, unless there is retrieval in mid-answer."""
    num_drafted: int = 0
    """Length of the draft that the complete prompt was sent with."""
    draft_answer: tuple[AnswerChunk, ...] = ()
    """The answer, if a draft is just that."""

    def now(self) -> float:
        """Return the seconds since the query was submitted."""
        return self.clock() - self.submitted_s

    @property
    def is_cut_short(self) -> bool:
        """Whether retrieval ended early, so that the complete prompt says so."""
        return self.cut_short is not None or self.source_error is not None

    def begin_stretch(self, query: str, step: AssembledPrompt, num_tokens: int = 0) -> None:
        """Make this the complete prompt, from which the answer goes on behind its first `num_tokens` tokens."""
        self.complete, self.first_complete = step, self.first_complete or step
        self.stretches += (Stretch(num_tokens, query, len(step.included)),)

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        """Return the mode's new context; raise ConfigurationError if it is no tuple or list of chunks."""
        folded = self.mode.fold(chunks, event)
        if not isinstance(folded, tuple | list) or not all(isinstance(chunk, Chunk) for chunk in folded):
            raise ConfigurationError(f"{part_name(self.mode)}.fold must return a tuple of chunks")
        return tuple(folded)
