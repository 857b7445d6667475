"""One question of a session, answered by the engine."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from streamrag.core import AnswerChunk, Backend, Prompt
from streamrag.errors import BackendError
from streamrag.handle import Emit
from streamrag.retrieving import closing
from streamrag.sessions.asking import Asked, first_tokens
from streamrag.sessions.ingestion import Snapshot
from streamrag.sessions.prompts import SessionPrompts
from streamrag.telemetry import Answer, Timings, TokensGenerated
from streamrag.tokenizing import in_thread


async def answered(
    backend: Backend,
    prompts: SessionPrompts,
    snapshot: Snapshot,
    asked: Asked,
    submitted_s: float,
    clock: Callable[[], float],
    emit: Emit,
) -> Answer:
    """The answer of the engine, in a request of its own; its pieces go to `emit`.

    :raises PromptTooLongError, BackendError: there is none.
    :raises ConfigurationError: the answers that there may be cannot be told from each other.
    """
    waited_s = clock() - submitted_s
    tokenizer = prompts.tokenizer
    by_token = await in_thread(tokenizer, partial(first_tokens, tokenizer, asked.answers)) if asked.answers else {}
    token_ids = await in_thread(tokenizer, partial(prompts.complete, snapshot.token_ids, asked.question))
    first_s: float | None = None
    chunks: list[AnswerChunk] = []
    async with (
        aclosing(_one_prompt(token_ids)) as whole,
        closing(backend.generate(whole, asked.for_engine(by_token))) as events,
    ):
        async for event in events:
            if isinstance(event, AnswerChunk):
                at_s = clock() - submitted_s
                first_s = at_s if first_s is None and (event.text or event.token_ids) else first_s
                chunks.append(event)
                if not by_token:
                    await emit(TokensGenerated(at_s, event.text, event.token_ids, event.finish_reason))
    total_s = clock() - submitted_s
    if not chunks or chunks[-1].finish_reason is None:
        raise BackendError("the engine ended without finishing its answer")
    first_s = total_s if first_s is None else first_s
    text = "".join(chunk.text for chunk in chunks)
    answer_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    if by_token:
        if not answer_ids or answer_ids[0] not in by_token:
            raise BackendError("the engine gave none of the answers that there may be")
        text = by_token[answer_ids[0]]
        await emit(TokensGenerated(first_s, text, answer_ids, "stop"))
    return Answer(
        text=text,
        token_ids=answer_ids,
        finish_reason="stop" if by_token else chunks[-1].finish_reason,
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


async def _one_prompt(token_ids: tuple[int, ...]) -> AsyncGenerator[Prompt, None]:
    yield Prompt(token_ids, 0, is_complete=True)


def _gap(logprobs: Any) -> float | None:
    """Between the two most likely of the first token, of those that the engine was asked for."""
    if not logprobs:
        return None
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else None
