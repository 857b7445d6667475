"""Draft the answer to a query while its context still changes.

    context    C1 ──────── C2 ───────── C3 (complete)
    draft         ░░░░░░░░░   ░░░░░░░                      generated from C1; from C2, verifying the first
    answer                              ████████           verifies the last draft, and continues behind it

A draft is a request of the lowest class of its own, whose prompt is what would be complete if retrieval ended now. It
shares the KV of the query's stream through the prefix cache. If it is finished, and the context does not change any
more, it is the answer, and nothing is left to compute. The answer does not depend on drafts.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

import anyio

from streamrag.core import AnswerChunk, Chunk, Prompt, SamplingParams, only
from streamrag.core.retrieval import closing
from streamrag.engine.drafts import AnswerDraft
from streamrag.query.options import Query
from streamrag.query.state import QueryState
from streamrag.support.tasks import cancel_and_wait
from streamrag.telemetry import DraftChanged

INTERVAL_S = 0.05
"""Least seconds between two events of a draft, each of which has its whole text."""
WAIT_FACTOR = 1.25
"""A draft's wait over the time in which the last one got no token: contexts of a steady pace are drafted no more."""


def why_not_drafted(query: Query, state: QueryState) -> str | None:
    """Return why no draft is possible: the backend, a grammar, n > 1, prompt_logprobs or the overlap; else None."""
    params, overlap = query.params, state.overlap
    if not state.backend.model.verifies_drafts:
        return "the backend verifies no drafts: use VllmBackend(answer_ahead=True)"
    if params.json_schema is not None or "structured_outputs" in params.extra:
        return "the answer follows a grammar, beside which drafts cannot be verified"
    if params.n > 1 or "prompt_logprobs" in params.extra:
        return "several answers and log-probabilities of the prompt are sampled by plain requests"
    if overlap.way != "immediate" and not query.draft:
        return f'there are no drafts with overlap "{overlap.way}": {overlap.reason}'
    return None


class AnswerAhead:
    """The drafts of one query. An async context manager: leaving it withdraws the draft that is being generated."""

    def __init__(self, params: SamplingParams, state: QueryState) -> None:
        self._params = params
        self._state = state
        self._prompt: tuple[int, ...] = ()
        self._token_ids: tuple[int, ...] = ()
        self._finished: tuple[AnswerChunk, ...] = ()
        self._text = ""
        self._shown_s = -INTERVAL_S
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False
        self._wait_s = 0.0  # where contexts change too often for a draft, the next one waits for one that lasts longer
        self._known: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.withdraw()

    async def begin(self, prompt: Prompt, chunks: tuple[Chunk, ...]) -> None:
        """Draft the answer to a complete prompt, whose passages are `chunks`, instead of that to an earlier one.

        The draft of `prompt` is verified if there is no earlier one. If the prompt has not changed, its draft goes on.
        Returns before there are tokens. An engine that fails ends the drafts, but not the query, which fails by itself
        if it must.
        """
        if prompt.token_ids == self._prompt:
            return
        self._prompt, self._finished = prompt.token_ids, ()
        draft = await self.withdraw() or prompt.draft
        if not self._has_failed:
            prompt = replace(prompt, request_class="draft", draft=draft)
            self._task = asyncio.create_task(self._generate(prompt, chunks), name="streamrag draft")

    async def withdraw(self) -> tuple[int, ...]:
        """Stop drafting, if a draft is being generated, and return the tokens of the last draft so far."""
        if self._task is not None:
            await cancel_and_wait([self._task])
            self._task = None
        return self._token_ids

    async def finish(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Stop drafting for the complete prompt, and return the tokens of the last draft, to be verified. If a draft is
        the answer, set `draft_answer` and never return: `run_until_known` stops the request.

        Above temperature 0 a draft is only verified: short ones are finished more often, so taking them as they are
        would change the probabilities of answers.
        """
        draft = await self.withdraw()
        if self._finished and token_ids == self._prompt and self._params.temperature == 0:
            self._state.draft_answer = self._finished
            self._known.set_result(None)
            await anyio.sleep_forever()
        return draft

    async def run_until_known(self, generating: Coroutine[Any, Any, None]) -> None:
        """Run the request for the answer to its end; once a draft is the answer, stop it, however it then ends."""
        task = asyncio.create_task(generating, name="streamrag answer")
        try:
            await asyncio.wait([task, self._known], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([task])
        if not self._known.done():
            task.result()

    async def _generate(self, prompt: Prompt, chunks: tuple[Chunk, ...]) -> None:
        """Draft and show the answer after `_wait_s`; keep its chunks if finished. An error only sets `_has_failed`. Set
        the next `_wait_s` in any case, and keep the tokens, continued by the draft before unless finished."""
        token_ids: list[int] = []
        answer: list[AnswerChunk] = []
        state, text, is_finished, begun_s = self._state, "", False, self._state.now()
        try:
            await asyncio.sleep(self._wait_s)
            async with (
                aclosing(only(prompt)) as prompts,
                closing(state.backend.generate(prompts, self._params)) as events,
            ):
                async for event in events:
                    if isinstance(event, AnswerChunk):
                        answer.append(event)
                        token_ids += event.token_ids
                        text += event.text
                        if is_finished := event.finish_reason is not None:
                            self._finished = tuple(answer)
                        await self._show(text, chunks, is_finished=is_finished)
        except Exception:  # a backend is foreign code, whose failure the query itself reports
            self._has_failed = True
        finally:
            before = AnswerDraft(() if is_finished else prompt.draft, 0)
            self._token_ids = before.continue_from(token_ids)
            self._wait_s = 0.0 if token_ids else max(self._wait_s, WAIT_FACTOR * (state.now() - begun_s))

    async def _show(self, text: str, chunks: tuple[Chunk, ...], *, is_finished: bool) -> None:
        """Emit the draft's text if new and finished, or if `INTERVAL_S` passed and the last text does not begin so."""
        at_s = self._state.now()
        is_due = at_s >= self._shown_s + INTERVAL_S and not self._text.startswith(text)
        if text != self._text and (is_finished or is_due):
            self._text, self._shown_s = text, at_s
            await self._state.emit(DraftChanged(at_s, text, chunks))
