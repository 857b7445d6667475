"""One question of a session, answered by the engine."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Any

from streamrag.core import AnswerChunk, Backend, Prompt, RequestClass, SamplingParams
from streamrag.errors import BackendError
from streamrag.handle import Emit
from streamrag.retrieving import closing
from streamrag.sessions.ingestion import Snapshot
from streamrag.sessions.prompts import SessionPrompts
from streamrag.telemetry import Answer, Timings, TokensGenerated
from streamrag.tokenizing import in_thread


async def answered(
    backend: Backend,
    prompts: SessionPrompts,
    snapshot: Snapshot,
    question: str,
    params: SamplingParams,
    submitted_s: float,
    clock: Callable[[], float],
    emit: Emit,
    request_class: RequestClass,
) -> Answer:
    """The answer to `question`, asked of the engine in a request of its own; its pieces go to `emit`.

    :raises PromptTooLongError, BackendError: there is none.
    """
    waited_s = clock() - submitted_s
    token_ids = await in_thread(backend.model.tokenizer, partial(prompts.complete, snapshot.token_ids, question))
    first_s: float | None = None
    chunks: list[AnswerChunk] = []
    async with (
        aclosing(_one_prompt(token_ids, request_class)) as whole,
        closing(backend.generate(whole, params)) as events,
    ):
        async for event in events:
            if isinstance(event, AnswerChunk):
                at_s = clock() - submitted_s
                first_s = at_s if first_s is None and (event.text or event.token_ids) else first_s
                chunks.append(event)
                await emit(TokensGenerated(at_s, event.text, event.token_ids, event.finish_reason))
    total_s = clock() - submitted_s
    if not chunks or chunks[-1].finish_reason is None:
        raise BackendError("the engine ended without finishing its answer")
    first_s = total_s if first_s is None else first_s
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=chunks[-1].finish_reason,
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
        record=chunks[-1].record,
        breaks_look_alikes=backend.model.breaks_look_alikes,
        version=snapshot.version,
        gap=next((_gap(chunk.logprobs) for chunk in chunks if chunk.token_ids), None),
    )


def again(answer: Answer, submitted_s: float, after_s: float) -> Answer:
    """The same answer, given anew without the engine."""
    timings = Timings(0.0, None, 0.0, after_s, after_s, after_s)
    return replace(answer, submitted_s=submitted_s, timings=timings, record=None)


def exact_key(params: SamplingParams) -> str:
    """Equal for parameters that make the same answer; nothing for those that may answer otherwise each time, or that
    hold what cannot be compared as text."""
    if params.temperature > 0:
        return ""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    try:
        return json.dumps({**values, "extra": dict(params.extra)}, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""


async def _one_prompt(token_ids: tuple[int, ...], request_class: RequestClass) -> AsyncGenerator[Prompt, None]:
    yield Prompt(token_ids, 0, is_complete=True, request_class=request_class)


def _gap(logprobs: Any) -> float | None:
    """Between the two most likely of the first token, of those that the engine was asked for."""
    if not logprobs:
        return None
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else None
