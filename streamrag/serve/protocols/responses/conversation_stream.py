"""The answer to a conversation that brings its own context, whose prompts stream to the backend as they grow."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from streamrag.core import Prefilled, Prompt, SamplingParams, Turn, common_prefix_len, part_name
from streamrag.core.retrieval import closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError
from streamrag.modes.conversation import Conversation, ConversationPrompt
from streamrag.query.answer_chunks import AnswerChunks
from streamrag.serve.open_queries import OpenQuery
from streamrag.serve.service import Service
from streamrag.telemetry import (
    Answered,
    ContextChanged,
    ContextComplete,
    PrefillProgressed,
    QueryEvent,
)


class ConversationStream:
    """A streamed request of the engine, open until the conversation is answered.

    `extend` sets the conversation so far. `events` yields the answer, and must be read in a task of its own. A backend
    that is slower than the prompts gets only the newest.
    """

    def __init__(self, service: Service, opened: OpenQuery, params: SamplingParams, conversation_id: str) -> None:
        self.params = params
        self._conversation_id = conversation_id
        self._service = service
        self._opened = opened
        self._tokenizer = service.model.tokenizer
        self._conversation = Conversation(self._tokenizer, service.model.max_model_len)
        self._newest: tuple[tuple[int, ...], int, bool] | None = None
        self._has_new = asyncio.Event()
        self._start_s = time.monotonic()
        self._complete_s = 0.0
        self._num_prompt_tokens = 0
        self._num_invalidated = 0

    @property
    def is_empty(self) -> bool:
        """Whether there has been no prompt."""
        return self._newest is None

    async def extend(self, turns: Sequence[Turn], *, is_complete: bool) -> ConversationPrompt:
        """Set the newest prompt to the conversation's and return it; on errors, keep the last. Another task sends it.

        is_complete: whether answers are wanted; otherwise only the partial prompt is sent.
        """
        max_tokens = self.params.max_tokens if is_complete else 1
        prompt = await in_thread(self._tokenizer, lambda: self._conversation.encode(turns, max_tokens=max_tokens))
        self._newest = prompt.token_ids if is_complete else prompt.partial, len(turns), is_complete
        self._has_new.set()
        return prompt

    async def events(self) -> AsyncGenerator[QueryEvent, None]:
        """Yield and report the answer's tokens, then `Answered`; only report prefill. Raises BackendError if the
        backend fails, or ends without a finish reason."""
        chunks = AnswerChunks(self._service.model, self._now)
        async with (
            aclosing(self._prompts()) as prompts,
            closing(self._service.backend.generate(prompts, self.params)) as events,
        ):
            async for event in events:
                if isinstance(event, Prefilled):
                    self._opened.note(PrefillProgressed(self._now(), event.num_tokens))
                    continue
                generated = chunks.add(event)
                self._opened.note(generated)
                yield generated
        if not chunks.finished():
            raise BackendError(f"{part_name(self._service.backend)} ended without finishing its answer")
        answer = chunks.join(
            num_prompt_tokens=self._num_prompt_tokens,
            retrieval_s=self._complete_s,
            num_invalidated=self._num_invalidated,
            submitted_s=self._start_s,
        )
        answered = Answered(answer.timings.total_s, answer)
        self._opened.note(answered)
        yield answered

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        """Report `ContextChanged` for the newest prompt, then yield it, whenever it has changed. At last do so for the
        complete prompt, even if unchanged, and also report `ContextComplete` before it is yielded."""
        sent: tuple[int, ...] = ()
        is_complete = False
        while not is_complete:
            await self._has_new.wait()
            self._has_new.clear()
            assert self._newest is not None
            token_ids, num_turns, is_complete = self._newest
            num_shared = common_prefix_len(sent, token_ids)
            if not is_complete and num_shared == len(token_ids) == len(sent):
                continue
            num_invalidated, unit = len(sent) - num_shared, self._service.model.unit
            self._num_invalidated += num_invalidated
            lengths = len(token_ids), num_shared, num_invalidated
            self._opened.note(ContextChanged(self._now(), num_turns, *lengths, unit=unit))
            if is_complete:
                self._complete_s = self._now()
                self._num_prompt_tokens = len(token_ids)
                self._opened.note(ContextComplete(self._complete_s, num_turns, len(token_ids), (), unit))
            sent = token_ids
            yield Prompt(token_ids, num_shared, is_complete, conversation_id=self._conversation_id)

    def _now(self) -> float:
        """Return the seconds since this stream was made."""
        return time.monotonic() - self._start_s
