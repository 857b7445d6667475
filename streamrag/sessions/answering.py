"""One question of a session, answered by the engine."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any

from streamrag.answer_stream import Emit
from streamrag.core import AnswerChunk, Backend, Prompt, SamplingParams
from streamrag.errors import BackendError
from streamrag.retrieving import closing
from streamrag.sessions.asking import Asked
from streamrag.sessions.choosing import chosen, spelled
from streamrag.sessions.ingestion import Snapshot
from streamrag.telemetry import Answer, Timings, TokensGenerated
from streamrag.tokenizing import in_thread


async def answered(
    backend: Backend,
    snapshot: Snapshot,
    asked: Asked,
    submitted_s: float,
    clock: Callable[[], float],
    emit: Emit,
) -> Answer:
    """The answer of the engine, in requests of its own: one, or more to tell answers apart. Its pieces go to `emit`.

    :raises PromptTooLongError, BackendError: there is none.
    :raises ConfigurationError: the answers that there may be cannot be told from each other.
    """
    waited_s = clock() - submitted_s
    prompts = snapshot.prompts
    tokenizer = prompts.tokenizer
    answers = await in_thread(tokenizer, partial(spelled, tokenizer, asked.answers)) if asked.answers else {}
    token_ids = await in_thread(tokenizer, partial(prompts.complete, snapshot.token_ids, asked.question))
    first_s: float | None = None
    chunks: list[AnswerChunk] = []
    with_logprobs = asked.with_gap or any(len(each) > 1 for each in answers)

    async def one_pass(begun: tuple[int, ...], allowed: Sequence[int]) -> tuple[int | None, Any]:
        params = asked.for_engine(allowed, with_logprobs=with_logprobs)
        async with aclosing(_chunks(backend, token_ids + begun, params)) as pieces:
            chunks[:] = [chunk async for chunk in pieces]
        first = next((chunk for chunk in chunks if chunk.token_ids), None)
        return (first.token_ids[0], first.logprobs and first.logprobs[0]) if first else (None, None)

    if answers:
        found = await chosen(answers, one_pass, asked.decisive_gap)
        text, answer_ids, first_s = found.text, found.token_ids, clock() - submitted_s
        gap = found.gap if asked.with_gap else None
        finish_reason = "stop"
        await emit(TokensGenerated(first_s, text, answer_ids, finish_reason))
    else:
        async with aclosing(_chunks(backend, token_ids, asked.for_engine())) as pieces:
            async for chunk in pieces:
                at_s = clock() - submitted_s
                first_s = at_s if first_s is None and (chunk.text or chunk.token_ids) else first_s
                chunks.append(chunk)
                await emit(TokensGenerated(at_s, chunk.text, chunk.token_ids, chunk.finish_reason))
        text = "".join(chunk.text for chunk in chunks)
        answer_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        finish_reason = chunks[-1].finish_reason or ""
        gap = next((_gap(chunk.logprobs) for chunk in chunks if chunk.token_ids), None)
    total_s = clock() - submitted_s
    first_s = total_s if first_s is None else first_s
    return Answer(
        text=text,
        token_ids=answer_ids,
        finish_reason=finish_reason,
        citations=(),
        left_out=(),
        shortened=(),
        num_prompt_tokens=len(token_ids),
        num_invalidated=0,
        is_exact=backend.model.is_exact,
        source_error=None,
        cut_short=None,
        submitted_s=submitted_s,
        timings=Timings(0.0, None, waited_s, first_s, first_s - waited_s, total_s),
        record=chunks[-1].record if chunks else None,
        breaks_look_alikes=backend.model.breaks_look_alikes,
        version=snapshot.version,
        gap=gap,
    )


def again(answer: Answer, submitted_s: float, after_s: float) -> Answer:
    """The same answer, given anew without the engine."""
    timings = Timings(0.0, None, 0.0, after_s, after_s, after_s)
    return replace(answer, submitted_s=submitted_s, timings=timings, record=None)


async def _chunks(
    backend: Backend, token_ids: tuple[int, ...], params: SamplingParams
) -> AsyncGenerator[AnswerChunk, None]:
    """Of one request. Whoever leaves closes it.

    :raises BackendError: it ended without its last chunk.
    """
    is_finished = False
    async with (
        aclosing(_one_prompt(token_ids)) as whole,
        closing(backend.generate(whole, params)) as events,
    ):
        async for event in events:
            if isinstance(event, AnswerChunk):
                is_finished = event.finish_reason is not None
                yield event
    if not is_finished:
        raise BackendError("the engine ended without finishing its answer")


async def _one_prompt(token_ids: tuple[int, ...]) -> AsyncGenerator[Prompt, None]:
    yield Prompt(token_ids, 0, is_complete=True, request_class="session")


def _gap(logprobs: Any) -> float | None:
    """Between the two most likely of the first token, of those that the engine was asked for; None where one alone is
    possible."""
    if not logprobs:
        return None
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    gap = float(best[0] - best[1]) if len(best) > 1 else inf
    return gap if isfinite(gap) else None
