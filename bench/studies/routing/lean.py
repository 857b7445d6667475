"""A lean model of an engine, for fleets of which vLLM's own scheduler would simulate too little in an hour.

It has what routing can change: steps with a budget of tokens, decodes first, prefills in order of arrival; a prefix
cache of whole blocks that evicts what was used least recently; KV that must fit before a prompt starts. It has neither
preemption nor another policy than FCFS, and a prompt's answer is reserved with it. `test_lean.py` holds it to vLLM's
scheduler. Prompts and all counts are in blocks of `BLOCK` tokens, answers in tokens.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from streamrag.core import common_prefix_len
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.routing import Report
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.soonest import QUERY_TOKENS, Speed

from .loads import BLOCK

MOST_OPEN = 256
"""Requests that an engine runs at once."""


@dataclass(eq=False, slots=True)
class LeanStream:
    """A prompt that may grow, and its answer."""

    engine: "LeanEngine"
    num_output: int
    keys: list[int] = field(default_factory=list)
    num_blocks: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    """Blocks of the prompt that the step under way computes."""
    num_spent: int = 0
    """Blocks that were computed for it, some more than once if its prompt changed."""
    is_complete: bool = False
    is_running: bool = False
    num_shown: int = 0
    waited_s: float = 0.0
    """Its share of the time for which prompts have waited."""
    _events: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)

    @property
    def num_left(self) -> int:
        """Blocks of the prompt that are still to be computed."""
        return self.num_blocks - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.is_complete and not self.num_left

    async def update(self, token_ids: Sequence[int], *, is_complete: bool) -> None:
        self.engine.update(self, token_ids, is_complete)

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        """How many tokens there are, at the first and at the last."""
        while self.num_output > (num := await self._events.get()):
            yield num
        yield num

    def show(self, num: int) -> None:
        is_first = not self.num_shown
        self.num_shown += num
        if is_first or self.num_shown == self.num_output:
            self._events.put_nowait(self.num_shown)


class LeanEngine:
    """One replica. To be used on a loop whose time is virtual.

    budget: tokens in a step.
    """

    stream_class: type[LeanStream] = LeanStream

    def __init__(
        self,
        profile: StepProfile,
        kv_tokens: int,
        *,
        budget: int = 8_192,
    ) -> None:
        self._profile, self._budget = profile, budget // BLOCK
        self.slowdown = 1.0
        """Every step takes so many times as long."""
        self.busy_s = 0.0
        self.num_steps = 0
        self._num_blocks = kv_tokens // BLOCK
        self._keys_of = PrefixIndex(block_size=1).keys
        self._users: Counter[int] = Counter()  # of blocks that requests hold
        self._free: OrderedDict[int, None] = OrderedDict()  # blocks of nobody, least recently used first
        self._computed: set[int] = set()  # keys of blocks that are there
        self._num_private = 0  # blocks of answers, which nobody else finds
        self._waiting: dict[LeanStream, None] = {}
        self._running: dict[LeanStream, None] = {}
        self._step: tuple[float, float, int, list[tuple[LeanStream, int]]] | None = None
        self._end: asyncio.TimerHandle | None = None
        self._found_and_asked = [0.0, 0.0]
        self._speed = Speed(QUERY_TOKENS / BLOCK)
        self._now: Callable[[], float] = lambda: 0.0  # the loop's, once there is one

    # --------------------------------------------------------------------------------------------------- for clients

    @asynccontextmanager
    async def stream(
        self, token_ids: Sequence[int], num_output: int, *, is_complete: bool
    ) -> AsyncIterator[LeanStream]:
        """A request. Leaving the context aborts what is not finished."""
        stream = self.stream_class(self, num_output)
        self.update(stream, token_ids, is_complete)
        try:
            yield stream
        finally:
            self._finish(stream)
            self._go_on()

    def update(self, stream: LeanStream, token_ids: Sequence[int], is_complete: bool) -> None:
        keys = self._keys_of(token_ids)
        num_shared = common_prefix_len(stream.keys, keys)
        if stream.is_running:
            self._let_go(stream.keys[num_shared:])
            self._take(keys[num_shared:])
            num_kept = min(stream.num_computed + stream.num_in_flight, num_shared)
            stream.num_computed = min(stream.num_computed, num_kept)
            stream.num_in_flight = num_kept - stream.num_computed
            stream.keys = keys
            if not stream.num_in_flight:
                stream.num_computed = max(stream.num_computed, min(self._num_there(keys), len(keys) - 1))
        else:
            self._waiting.setdefault(stream)
        stream.keys, stream.num_blocks, stream.is_complete = keys, len(keys), is_complete
        self._go_on()

    def report(self) -> Report:
        found, asked = self._found_and_asked
        return Report(
            max_open=MOST_OPEN,
            kv_usage=min((len(self._users) + self._num_private) / self._num_blocks, 1.0),
            cache_hit_rate=found / asked if asked else 0.0,
            queued_tokens=sum(stream.num_left for streams in (self._waiting, self._running) for stream in streams),
            num_kv_tokens=self._num_blocks,
            tokens_per_s=self._speed.tokens_per_s(self._now()),
        )

    # --------------------------------------------------------------------------------------------------------- steps

    def _go_on(self) -> None:
        """Something has come in or gone."""
        self._now = asyncio.get_running_loop().time
        now_s = self._now()
        self._note_queue(now_s)
        if self._step is None:
            self._begin(now_s)
            return
        start_s, step_s, num_steps, parts = self._step
        num_begun = min(num_steps, math.floor((now_s - start_s) / step_s) + 1)
        if num_begun < num_steps:  # it was to decode for longer
            assert self._end
            self._end.cancel()
            self._step = start_s, step_s, num_begun, parts
            self._end = asyncio.get_running_loop().call_at(start_s + num_begun * step_s, self._on_end)

    def _begin(self, now_s: float) -> None:
        decoding = [stream for stream in self._running if stream.is_decoding]
        prefilling = self._plan(self._budget - math.ceil(len(decoding) / BLOCK))
        parts = [(1, stream.num_blocks * BLOCK + stream.num_shown) for stream in decoding]
        parts += [(num * BLOCK, stream.num_computed * BLOCK) for stream, num in prefilling]
        if not parts:
            self._step = None
            return
        step_s = self._profile.step_s(parts) * self.slowdown
        # Only the first and the last token are reported, so several steps at once must not have a first.
        is_single = prefilling or any(not stream.num_shown for stream in decoding)
        num_steps = 1 if is_single else min(stream.num_output - stream.num_shown for stream in decoding)
        for stream, num in prefilling:  # whoever comes meanwhile starts later, and finds it
            stream.num_in_flight = num
            stream.num_spent += num
            self._computed.update(stream.keys[: stream.num_computed + num])
        self._step = now_s, step_s, num_steps, prefilling + [(stream, 0) for stream in decoding]
        self._end = asyncio.get_running_loop().call_at(now_s + num_steps * step_s, self._on_end)

    def _on_end(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._end_step(now_s)
        self._note_queue(now_s)
        self._begin(now_s)

    def _end_step(self, now_s: float) -> None:
        assert self._step
        _, step_s, num_steps, parts = self._step
        self.busy_s += step_s * num_steps
        self.num_steps += num_steps
        for stream, num in parts:
            if not stream.is_running:
                continue  # it was aborted
            if num:
                self._end_prefill(stream, now_s)
            else:
                self._end_decode(stream, num_steps, now_s)
            if stream.num_shown == stream.num_output:
                self._finish(stream)

    def _end_prefill(self, stream: LeanStream, now_s: float) -> None:
        stream.num_computed += stream.num_in_flight
        stream.num_in_flight = 0
        if not stream.num_left:
            stream.waited_s += self._speed.computed(now_s)
        if stream.is_decoding:
            self._speed.add(stream.num_spent, stream.waited_s, now_s)
            stream.show(1)

    def _end_decode(self, stream: LeanStream, num_steps: int, now_s: float) -> None:
        if not stream.num_shown:
            self._speed.add(stream.num_spent, stream.waited_s, now_s)
        stream.show(num_steps)

    def _note_queue(self, now_s: float) -> None:
        is_waiting = any(stream.num_left for streams in (self._waiting, self._running) for stream in streams)
        self._speed.waiting(is_waiting, now_s)

    def _plan(self, budget: int) -> list[tuple[LeanStream, int]]:
        parts = []
        for stream in self._running:
            if stream.num_left and budget > 0:
                parts.append((stream, min(stream.num_left, budget)))
                budget -= parts[-1][1]
        while budget > 0 and self._waiting and len(self._running) < MOST_OPEN:
            stream = next(iter(self._waiting))
            if not self._starts(stream):
                break
            parts.append((stream, min(stream.num_left, budget)))
            budget -= parts[-1][1]
        return parts

    # ------------------------------------------------------------------------------------------------------------ KV

    def _starts(self, stream: LeanStream) -> bool:
        num_new = sum(key not in self._users for key in stream.keys) + self._private(stream)
        if len(self._users) + self._num_private + num_new > self._num_blocks and self._running:
            return False
        stream.num_computed = min(self._num_there(stream.keys), stream.num_blocks - 1)
        self._found_and_asked[0] += stream.num_computed
        self._found_and_asked[1] += stream.num_blocks
        del self._waiting[stream]
        self._running[stream] = None
        stream.is_running = True
        self._num_private += self._private(stream)
        self._take(stream.keys)
        return True

    def _num_there(self, keys: Sequence[int]) -> int:
        num = 0
        while num < len(keys) and keys[num] in self._computed:
            num += 1
        return num

    def _finish(self, stream: LeanStream) -> None:
        self._waiting.pop(stream, None)
        if stream.is_running:
            stream.is_running = False
            del self._running[stream]
            self._num_private -= self._private(stream)
            self._let_go(stream.keys)

    def _private(self, stream: LeanStream) -> int:
        return math.ceil(stream.num_output / BLOCK) + 1

    def _take(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._users[key] += 1
            self._free.pop(key, None)
        while self._free and len(self._users) + self._num_private + len(self._free) > self._num_blocks:
            self._computed.discard(self._free.popitem(last=False)[0])

    def _let_go(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # ends are forgotten before beginnings
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                if key in self._computed:
                    self._free[key] = None
