"""The options of retrieval in mid-answer, and what is learned from answer to answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter

from streamrag.core import Backend
from streamrag.errors import ConfigurationError
from streamrag.query.options import Query
from streamrag.query.prompts import QueryPrompts
from streamrag.refresh.refreshed_backend import RefreshedBackend
from streamrag.support.validation import Count, Positive, Text, check, validated

MakeQuery: TypeAlias = Callable[[str, str], str | None]
"""A function of the question and of the answer's text so far. It returns the text to retrieve for, or None for no
retrieval now."""

MAX_QUERY_CHARS = 300
"""Most characters of `latest_text`: some 64 tokens, the stride of PipeRAG."""

DECAY = 0.8
"""Weight of all earlier observations of a speed at the next one."""

QUERY: TypeAdapter[str | None] = TypeAdapter(Text | None)


def latest_text(question: str, text: str) -> str | None:
    """Return the last words of the answer's text, at most 300 characters; None if it is blank. Ignores the question.

    >>> latest_text("Where was he born?", "He was born in Ulm.")
    'He was born in Ulm.'
    """
    latest = text.strip()
    if len(latest) > MAX_QUERY_CHARS:
        latest = latest[-MAX_QUERY_CHARS:].partition(" ")[2] or latest[-MAX_QUERY_CHARS:]
    return latest or None


@dataclass(slots=True)
class MeanSeconds:
    """The mean seconds per unit of work, in which the newest observations count most."""

    amount: float = 0.0
    """Units of work that were observed, decayed; 0 before the first observation."""
    total_s: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Record that `amount` units took `seconds`."""
        self.amount = DECAY * self.amount + amount
        self.total_s = DECAY * self.total_s + seconds

    def seconds(self, amount: float) -> float:
        """Return the seconds that `amount` units are expected to take; 0 before the first observation."""
        return amount * self.total_s / self.amount if self.amount else 0.0


class Refresh:
    """Retrieval in mid-answer, for `pipeline.stream(query, refresh=...)`.

    Use one for all queries of a pipeline: it learns how long retrieval and prefill take.

    every_tokens: tokens of the answer from its beginning, or from the end of the last retrieval, to the next use of a
        retrieval. The retrieval begins as many tokens earlier as earlier ones in mid-answer took, at most half of
        them. The first one with these options measures that, and begins no earlier.
    max_retrievals: most retrievals in one answer.
    max_passages: most passages that one retrieval adds to the prompt: the first ones that are not in it.
    max_cost: most seconds of recomputation for each second that the rest of the answer is expected to take, which is as
        long as the answer so far, up to `max_tokens`.
    make_query: makes the text to retrieve for.

    :raises ConfigurationError: an option has an invalid value.
    """

    @validated
    def __init__(
        self,
        *,
        every_tokens: Count = 64,
        max_retrievals: Count = 4,
        max_passages: Count = 2,
        max_cost: Positive = 1.0,
        make_query: Annotated[MakeQuery, Field()] = latest_text,
    ) -> None:
        self.every_tokens = every_tokens
        self.max_retrievals = max_retrievals
        self.max_passages = max_passages
        self.max_cost = max_cost
        self._make_query = make_query
        self.retrieval = MeanSeconds()
        """Seconds per retrieval in mid-answer, with the prefill of what it found."""
        self.prefill = MeanSeconds()
        """Seconds per token of prefill, beside whatever else the engine computes."""

    def query_after(self, question: str, text: str) -> str | None:
        """Return what to retrieve for after this text of the answer; None for nothing, also if it would be blank.

        :raises ConfigurationError: `make_query` returned something else than a text or None.
        """
        query = check("the result of make_query", self._make_query(question, text), QUERY)
        return query if query and query.strip() else None

    def check_query(self, query: Query) -> None:
        """Raise ConfigurationError for options that concern the whole answer, or its only prompt, in the engine."""
        params = query.params
        given = {
            "answer_ahead": query.answer_ahead,
            "draft": bool(query.draft),
            "n above 1": params.n > 1,
            "stop": bool(params.stop),
            "json_schema": params.json_schema is not None,
            "structured_outputs": "structured_outputs" in params.extra,
            "log-probabilities of the prompt": any(name.startswith("prompt_logprob") for name in params.extra),
        }
        if refused := [name for name, is_given in given.items() if is_given]:
            raise ConfigurationError(
                f"refresh= does not work with {', '.join(refused)}: switch that off, or retrieve once, without refresh"
            )

    def backend_for(self, prompts: QueryPrompts, backend: Backend) -> Backend:
        """Return the backend of one query, whose prompts these are; see `RefreshedBackend`."""
        return RefreshedBackend(self, prompts, backend)
