"""The chunks of a request's answers, from the first one to the whole answer."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from streamrag.core import AnswerChunk, ModelInfo
from streamrag.telemetry import Alternative, Answer, Timings, TokensGenerated


class AnswerChunks:
    """The chunks of a request in the order in which they came, with the time of the first token.

    model: the model that generates them.
    now: a clock that counts seconds from the query.
    """

    def __init__(self, model: ModelInfo, now: Callable[[], float]) -> None:
        self._model = model
        self._now = now
        self._chunks: list[AnswerChunk] = []
        self._first_token_s: float | None = None

    def add(self, chunk: AnswerChunk) -> TokensGenerated:
        """Add a chunk, and return its event."""
        at_s = self._now()
        if self._first_token_s is None and (chunk.token_ids or chunk.text):
            self._first_token_s = at_s
        self._chunks.append(chunk)
        return TokensGenerated(at_s, chunk)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(token_id for chunk in self._chunks for token_id in chunk.token_ids)

    def finished(self) -> dict[int, Alternative]:
        """Return the answers by their index, each joined from its chunks; those that are not finished are left out."""
        parts: defaultdict[int, list[AnswerChunk]] = defaultdict(list)
        for chunk in self._chunks:
            parts[chunk.index].append(chunk)
        return {
            index: Alternative(
                "".join(chunk.text for chunk in part), tuple(i for chunk in part for i in chunk.token_ids), reason
            )
            for index, part in parts.items()
            if (reason := part[-1].finish_reason) is not None
        }

    def join(
        self,
        *,
        num_prompt_tokens: int,
        retrieval_s: float,
        queued_s: float = 0.0,
        first_chunk_s: float | None = None,
        **fields: Any,
    ) -> Answer:
        """Return answer 0 with its usage, record and timings; the other answers, all finished, are its alternatives.

        Without a token, the time to first token is the total time.

        fields: the answer's other fields: its context, and its time of submission.
        """
        answers, last, model, total_s = self.finished(), self._chunks[-1], self._model, self._now()
        ttft_s = total_s if self._first_token_s is None else self._first_token_s
        num_output = sum(len(answer.token_ids) for answer in answers.values())
        text = "".join(answer.text for answer in answers.values())
        return Answer(
            text=answers[0].text,
            token_ids=answers[0].token_ids,
            finish_reason=answers[0].finish_reason,
            num_prompt_tokens=num_prompt_tokens,
            is_exact=model.is_exact,
            timings=Timings(queued_s, first_chunk_s, retrieval_s, ttft_s, ttft_s - retrieval_s, total_s),
            record=last.record,
            breaks_look_alikes=model.breaks_look_alikes,
            usage=model.usage(num_prompt_tokens, num_output, text, last.usage),
            unit=model.unit,
            alternatives=tuple(answers[index] for index in range(1, len(answers))),
            prompt_logprobs=next((c.prompt_logprobs for c in self._chunks if c.prompt_logprobs is not None), None),
            **fields,
        )
