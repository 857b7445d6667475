"""One question of a session, answered by the engine: as it likes, or with one of a few answers.

Of a few answers, as few tokens are computed as tell them apart:

    prompt | no
           | very ─ high        One pass behind the prompt says how likely "no" and "very" are. If "no" leads, or "very"
                 └─ low         leads and had one answer, that is it; else another pass stands behind "very".

The ready-position exit of arXiv 2605.13784, section 3.9.4, with one difference: the paper looks at the end of the data,
before any question, and gives each question the same answer. Here it is the end of the prompt, behind the question.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any, TypeAlias

from streamrag.core import AnswerChunk, Backend, ModelInfo, Prompt, SamplingParams, Tokenizer
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError
from streamrag.query.answer_stream import Emit
from streamrag.query.retrieval import closing
from streamrag.sessions.ingestion import Snapshot
from streamrag.sessions.question import DECISIVE_GAP, Question
from streamrag.telemetry import Answer, Timings, TokensGenerated

TokenIds: TypeAlias = tuple[int, ...]
Pass: TypeAlias = Callable[[TokenIds, Sequence[int]], Awaitable[tuple[int | None, Any]]]
"""Takes tokens behind the prompt, and those that may come next. Returns the one that does, and the log-probabilities of
all as the engine has them; None if it has none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer that was chosen of a few."""

    text: str
    token_ids: TokenIds
    """Tokens of the answer, as far as they had to be computed."""
    gap: float | None
    """The lead of the answer; None where the engine has no log-probabilities, or no other answer is possible."""


class _Draft:
    """An answer that is being computed: its pieces so far, and when they came."""

    def __init__(self, snapshot: Snapshot, submitted_s: float, clock: Callable[[], float], emit: Emit) -> None:
        self._snapshot = snapshot
        self._submitted_s = submitted_s
        self._clock = clock
        self._emit = emit
        self._waited_s = clock() - submitted_s
        self._pieces: list[TokensGenerated] = []
        self.chunks: list[AnswerChunk] = []
        """Chunks of the newest request."""

    async def put(self, chunk: AnswerChunk) -> None:
        """Add a piece of the answer."""
        at_s = self._clock() - self._submitted_s
        self._pieces.append(TokensGenerated(at_s, chunk.text, chunk.token_ids, chunk.finish_reason))
        await self._emit(self._pieces[-1])

    def finish(self, model: ModelInfo, num_prompt_tokens: int, gap: float | None) -> Answer:
        """Return the whole answer."""
        total_s = self._clock() - self._submitted_s
        first_s = next((piece.at_s for piece in self._pieces if piece.text or piece.token_ids), total_s)
        return Answer(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token_id for piece in self._pieces for token_id in piece.token_ids),
            finish_reason=self._pieces[-1].finish_reason or "",
            citations=(),
            left_out=(),
            shortened=(),
            num_prompt_tokens=num_prompt_tokens,
            num_invalidated=0,
            is_exact=model.is_exact,
            source_error=None,
            cut_short=None,
            submitted_s=self._submitted_s,
            timings=Timings(0.0, None, self._waited_s, first_s, first_s - self._waited_s, total_s),
            record=self.chunks[-1].record if self.chunks else None,
            breaks_look_alikes=model.breaks_look_alikes,
            version=self._snapshot.version,
            gap=gap,
        )


async def compute_answer(
    backend: Backend,
    snapshot: Snapshot,
    question: Question,
    submitted_s: float,
    clock: Callable[[], float],
    emit: Emit,
) -> Answer:
    """Return the engine's answer, whose pieces go to `emit`.

    :raises PromptTooLongError, BackendError: there is none.
    :raises ConfigurationError: the answers that there may be cannot be told from each other.
    """
    draft = _Draft(snapshot, submitted_s, clock, emit)
    tokenizer, answers = snapshot.prompts.tokenizer, question.answers
    choices = await in_thread(tokenizer, partial(encode_answers, tokenizer, answers)) if answers else {}
    token_ids = await in_thread(tokenizer, partial(snapshot.prompts.complete, snapshot.token_ids, question.text))
    if choices:
        one_pass = _passes(backend, token_ids, question, choices, draft.chunks)
        choice = await choose_answer(choices, one_pass, question.decisive_gap)
        await draft.put(AnswerChunk(choice.text, choice.token_ids, "stop"))
        return draft.finish(backend.model, len(token_ids), choice.gap if question.with_gap else None)
    async with aclosing(_generate(backend, token_ids, question.params_for())) as generated:
        async for chunk in generated:
            draft.chunks.append(chunk)
            await draft.put(chunk)
    gap = next((_gap(chunk.logprobs) for chunk in draft.chunks if chunk.token_ids), None)
    return draft.finish(backend.model, len(token_ids), gap)


def encode_answers(tokenizer: Tokenizer, answers: Sequence[str]) -> dict[TokenIds, str]:
    """Return answers by their tokens. Blocking.

    :raises ConfigurationError: one has no tokens, or is another's beginning.
    """
    by_tokens: dict[TokenIds, str] = {}
    for text in answers:
        token_ids = tuple(tokenizer.encode(text))
        if not token_ids:
            raise ConfigurationError(f"the answer {text!r} has no tokens: choose another")
        for other_ids, other in by_tokens.items():
            num_shared = min(len(token_ids), len(other_ids))
            if token_ids[:num_shared] == other_ids[:num_shared]:
                raise ConfigurationError(
                    f"the answers {other!r} and {text!r} begin with the same tokens, and one of them ends there: "
                    "choose others"
                )
        by_tokens[token_ids] = text
    return by_tokens


async def choose_answer(answers: Mapping[TokenIds, str], one_pass: Pass, decisive_gap: float = DECISIVE_GAP) -> Choice:
    """Return the likeliest of `answers`, which are as `encode_answers` returns them.

    The likeliest beginning is extended until it is an answer, or has one only and leads by `decisive_gap`. Where the
    engine has no log-probabilities, its own tokens are followed.

    :raises BackendError: the engine gave none of the answers.
    """
    likely: dict[TokenIds, float] = {(): 0.0}
    while True:
        best = max(likely, key=likely.__getitem__)
        left = [token_ids for token_ids in answers if token_ids[: len(best)] == best]
        others = [value for token_ids, value in likely.items() if token_ids != best]
        lead = likely[best] - max(others, default=-inf)
        if best in answers or (best and len(left) == 1 and lead >= decisive_gap):
            return Choice(answers[left[0]], best, lead if isfinite(lead) else None)
        after = list(dict.fromkeys(token_ids[len(best)] for token_ids in left))
        if len(after) == 1 and not others:  # tokens that all have in common decide nothing
            likely = {(*best, after[0]): 0.0}
            continue
        token_id, logprobs = await one_pass(best, after)
        if token_id not in after:
            raise BackendError("the engine gave none of the answers that there may be")
        known = {each: logprobs[each].logprob for each in after if each in logprobs} if logprobs else {}
        if len(known) < len(after):
            likely = {(*best, token_id): 0.0}
            continue
        value = likely.pop(best)
        for each in sorted(after, key=lambda each: each != token_id):  # of equals, the engine's own
            likely[*best, each] = value + known[each]


def _passes(
    backend: Backend,
    token_ids: TokenIds,
    question: Question,
    choices: Mapping[TokenIds, str],
    chunks: list[AnswerChunk],
) -> Pass:
    """Return what makes one pass of the engine; the chunks of the newest stand in `chunks`."""
    with_logprobs = question.with_gap or any(len(each) > 1 for each in choices)

    async def one_pass(begun: TokenIds, allowed: Sequence[int]) -> tuple[int | None, Any]:
        params = question.params_for(allowed, with_logprobs=with_logprobs)
        async with aclosing(_generate(backend, token_ids + begun, params)) as pieces:
            chunks[:] = [chunk async for chunk in pieces]
        first = next((chunk for chunk in chunks if chunk.token_ids), None)
        return (first.token_ids[0], first.logprobs and first.logprobs[0]) if first else (None, None)

    return one_pass


async def _generate(backend: Backend, token_ids: TokenIds, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
    """Yield the chunks of one request, which ends when this is closed.

    :raises BackendError: it ended without its last chunk.
    """
    is_finished = False
    async with (
        aclosing(_one_prompt(token_ids)) as prompts,
        closing(backend.generate(prompts, params)) as events,
    ):
        async for event in events:
            if isinstance(event, AnswerChunk):
                is_finished = event.finish_reason is not None
                yield event
    if not is_finished:
        raise BackendError("the engine ended without finishing its answer")


async def _one_prompt(token_ids: TokenIds) -> AsyncGenerator[Prompt, None]:
    yield Prompt(token_ids, 0, is_complete=True, request_class="session")


def _gap(logprobs: Any) -> float | None:
    """Return the gap between the two most likely first tokens; None where only one is possible."""
    if not logprobs:
        return None
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    gap = float(best[0] - best[1]) if len(best) > 1 else inf
    return gap if isfinite(gap) else None
