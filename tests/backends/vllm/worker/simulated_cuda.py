"""What `CudaCopies` needs of CUDA, without a device: streams that run late, one or the other, as chance will have it.

A stream is a queue, and to issue something is only to append it. Whenever something is issued, some of what is at the
head of the queues runs, unless it waits for an event that has not happened. So one run shows one order of those that a
device may choose.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Rows(list[Any]):
    """What the blocks or slots of a layer hold."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), BLOCK_BYTES


BLOCK_BYTES = 64
Memory = dict[str, Rows]


def do_nothing() -> None: ...


@dataclass(eq=False)
class Event:
    """Each time it is recorded, it happens once more. Who waits, waits for what is recorded by then."""

    num_recorded: int = 0
    num_happened: int = 0

    def record(self, stream: "Stream") -> None:
        self.num_recorded += 1
        stream.issue(self._happen)

    def _happen(self) -> None:
        self.num_happened += 1

    def query(self) -> bool:
        return self.num_happened == self.num_recorded

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query()
        return 1_000.0


@dataclass(eq=False)
class Stream:
    device: "Device"
    queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=deque)
    """Whether each may run by now, and what it does."""

    def issue(self, work: Callable[[], None], may_run: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((may_run, work))
        self.device.run_some()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        num = event.num_recorded
        self.issue(do_nothing, lambda: event.num_happened >= num)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        while self.queue:
            self.device.run_one()


class Device:
    """Without `rng` everything runs at once, in the order in which it is issued."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng
        self._streams: list[Stream] = []
        self.compute = self.current = self._new_stream()

        def stream(priority: int) -> Stream:
            return self._new_stream()

        stream.priority_range = lambda: (0, -1)  # type: ignore[attr-defined]
        self.torch = SimpleNamespace(
            tensor=list,
            cuda=SimpleNamespace(
                Stream=stream,
                Event=lambda enable_timing: Event(),
                current_stream=lambda: self.current,
                stream=self._entered,
            ),
        )
        """Stands for the module."""

    def _new_stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def run_some(self) -> None:
        if self._rng is None:
            self.synchronize()
        else:
            for _ in range(self._rng.choice((0, 0, 0, 1))):
                self.run_one()

    def run_one(self) -> None:
        ready = [stream for stream in self._streams if stream.queue and stream.queue[0][0]()]
        if ready:
            stream = self._rng.choice(ready) if self._rng else ready[0]
            stream.queue.popleft()[1]()
        else:
            assert not any(stream.queue for stream in self._streams), "they wait for each other"

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    # ------------------------------------------------------------------------------ in place of vLLM's `swap_blocks`

    def swap_blocks(self, read: "Rows", write: "Rows", block_bytes: int, pairs: Sequence[tuple[int, int]]) -> None:
        assert block_bytes == read.shape[1] == write.shape[1]
        for source, target in pairs:

            def copy(source: int = source, target: int = target) -> None:
                write[target] = read[source]

            self.current.issue(copy)
