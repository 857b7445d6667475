"""Answers that several askers have of one computation: those that are kept, and those that are under way."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

from streamrag.answer_stream import Emit
from streamrag.support.tasks import Broadcast, cancel_regardless
from streamrag.telemetry import Answer, Event, Timings, TokensGenerated

Compute: TypeAlias = Callable[[Emit], Coroutine[Any, Any, Answer]]
"""Emits an answer's pieces, and returns the whole."""


class KeptAnswers:
    """An LRU cache of answers, of at most so many and so many bytes."""

    def __init__(self, at_most: int, max_bytes: int) -> None:
        self._at_most = at_most
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[Hashable, tuple[Answer, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Hashable) -> Answer | None:
        """Return the answer that is kept under this key."""
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key][0]

    def put(self, key: Hashable, answer: Answer, num_bytes: int) -> None:
        """Keep an answer that takes so many bytes with its key."""
        _, num_before = self._answers.pop(key, (answer, 0))
        self._answers[key] = answer, num_bytes
        self._num_bytes += num_bytes - num_before
        while len(self._answers) > self._at_most or self._num_bytes > self._max_bytes:
            _, (_, num_gone) = self._answers.popitem(last=False)
            self._num_bytes -= num_gone

    def clear(self) -> None:
        """Forget all: they are of a version that no longer stands."""
        self._answers.clear()
        self._num_bytes = 0


class UnderWay:
    """Answers that are being computed. Whoever asks for the same one has it too; the last who leaves ends it.

    clock: what times are told by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: dict[Hashable, _Computation] = {}

    async def answer(self, key: Hashable, compute: Compute, submitted_s: float, emit: Emit) -> Answer:
        """What `compute` returns, or whoever has begun the same; its times are those of who asks."""
        computation = self._under_way.get(key)
        is_own = computation is None
        if computation is None:
            computation = self._under_way[key] = _Computation(compute)
        computation.num_askers += 1
        waited_s, first_s = self._clock() - submitted_s, None
        try:
            async with aclosing(computation.pieces()) as pieces:
                async for piece in pieces:
                    at_s = self._clock() - submitted_s
                    first_s = at_s if first_s is None and (piece.text or piece.token_ids) else first_s
                    await emit(replace(piece, at_s=at_s))
            answer = computation.task.result()
        finally:
            computation.num_askers -= 1
            if not computation.num_askers:
                if self._under_way.get(key) is computation:  # whoever comes now begins anew
                    del self._under_way[key]
                await cancel_regardless([computation.task])
        if is_own:
            return answer
        total_s = self._clock() - submitted_s
        first_s = total_s if first_s is None else first_s
        timings = Timings(0.0, None, waited_s, first_s, first_s - waited_s, total_s)
        return replace(answer, submitted_s=submitted_s, timings=timings)


class _Computation:
    """One of them."""

    def __init__(self, compute: Compute) -> None:
        self.num_askers = 0
        self._pieces: list[TokensGenerated] = []
        self._news = Broadcast()
        self.task = asyncio.create_task(compute(self._put), name="streamrag shared answer")
        self.task.add_done_callback(lambda _: self._news.wake())

    async def pieces(self) -> AsyncGenerator[TokensGenerated, None]:
        """All, also those of before."""
        num_read = 0
        while num_read < len(self._pieces) or not self.task.done():
            if num_read == len(self._pieces):
                await self._news.wait()
            for piece in self._pieces[num_read:]:
                num_read += 1
                yield piece

    async def _put(self, event: Event) -> None:
        assert isinstance(event, TokensGenerated)
        self._pieces.append(event)
        self._news.wake()
