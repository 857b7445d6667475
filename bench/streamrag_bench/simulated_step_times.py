"""The duration of a simulated engine's steps, from the tokens that they compute and the KV blocks that they copy.

step (vLLM's SchedulerOutput) ──▶ parts  ──▶ StepProfile ─┐
                             └──▶ copies ──▶ CopyClock ◀──┘──▶ seconds; also totals, and a log for timelines
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias

from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.engine.costs.step_profiles import StepPart, StepProfile, TableProfile
from streamrag.errors import ConfigurationError
from streamrag_bench.cell import CopyResult, CopyTotals

MeasuredStep: TypeAlias = Any
"""vLLM's `SchedulerOutput`: this module does not import vLLM."""
PartsOf: TypeAlias = Callable[[MeasuredStep], Iterable[tuple[str, StepPart]]]

NUM_CONSECUTIVE = 50
"""Block length of the bootstrap: consecutive steps get slowdown factors that were measured consecutively."""


@dataclass(slots=True)
class CopyClock:
    """The two copy engines of a device in virtual time, one for each direction, each with a FIFO queue.

        step    start ──▶ must-saves ──▶ forward of num_layers layers ──▶ end
        out     [held of the step before][must-saves][held ......]
        in                               [loads ..........]

    Blocks that a step overwrites (must-saves) are saved before its forward. Blocks that stay (held) are saved beside
    it, and loads overlap with the forward layer by layer. On a device that cannot copy and compute at the same time,
    such as a CPU, all copies add to the step.
    """

    costs: CopyCosts
    num_layers: int
    """Layers of the model, because loads and the forward overlap layer by layer."""
    busy_out_s: float = 0.0
    busy_in_s: float = 0.0
    _out_free_s: float = field(default=0.0, init=False)
    """When the queue of copies out will be empty."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigurationError(f"num_layers={self.num_layers}: a model has at least one")

    def step_s(
        self, start_s: float, compute_s: float, num_saves: int = 0, num_held_saves: int = 0, num_loads: int = 0
    ) -> float:
        """Return the seconds of a step that starts at `start_s`, which is after the end of the previous step, with its
        waits for copies. Adds the copies to `busy_out_s` and `busy_in_s`.

        The forward takes `compute_s`, `num_saves` blocks are saved before it and `num_held_saves` beside it, as in the
        class's drawing; if the device cannot copy and compute at the same time, all seconds add up.
        """
        saves_s, held_s = self.costs.out_s(num_saves), self.costs.out_s(num_held_saves)
        loads_s = self.costs.in_s(num_loads)
        self.busy_out_s += saves_s + held_s
        self.busy_in_s += loads_s
        if not self.costs.is_overlapped:
            return saves_s + held_s + loads_s + compute_s
        # The held saves of the previous step must end first, because this step may overwrite their blocks.
        forward_s = max(start_s, self._out_free_s) + saves_s
        self._out_free_s = forward_s + held_s
        # Loads may go into the blocks of the must-saves, and the last layer waits for its own load.
        behind_loads_s = loads_s + compute_s / self.num_layers if num_loads else 0.0
        return forward_s + max(compute_s, behind_loads_s) - start_s


class StepTimes:
    """A callable that returns the seconds of a step, given the step and its start. Call it once per step, in order."""

    def __init__(
        self,
        profile: StepProfile,
        parts_of: PartsOf,
        *,
        copies: CopyCosts | None,
        log: "CopyLog | None" = None,
        unsteady_seed: int = 0,
    ) -> None:
        self._profile = profile
        self._factors = _unsteadiness(profile, unsteady_seed)
        self._parts_of = parts_of
        self._clock = CopyClock(copies, profile.num_layers) if copies else None
        self._log = log
        self._num_saved = self._num_loaded = 0

    def __call__(self, step: MeasuredStep, start_s: float) -> float:
        """Return the seconds of a step that begins at `start_s`, and count and log its copies."""
        parts = [part for _, part in self._parts_of(step)]
        compute_s = self._profile.step_s(parts) * next(self._factors) if parts else 0.0
        copies = step.kv_connector_metadata
        if copies is None or self._clock is None:
            return compute_s
        num_saves, num_held, num_loads = len(copies.saves), len(copies.held_saves), len(copies.loads)
        self._num_saved += num_saves + num_held
        self._num_loaded += num_loads
        if self._log:
            self._log.add_step(step, start_s)
        return self._clock.step_s(start_s, compute_s, num_saves, num_held, num_loads)

    @property
    def totals(self) -> CopyTotals | None:
        """Totals of the copies so far, with the bytes of all ranks; None without host memory."""
        if self._clock is None:
            return None
        # Each rank copies its share of every block.
        block_bytes = self._clock.costs.block_bytes * self._profile.tensor_parallel_size
        return CopyTotals(
            num_blocks_saved=self._num_saved,
            num_blocks_loaded=self._num_loaded,
            num_bytes_out=self._num_saved * block_bytes,
            num_bytes_in=self._num_loaded * block_bytes,
            out_s=self._clock.busy_out_s,
            in_s=self._clock.busy_in_s,
        )


def _unsteadiness(profile: StepProfile, seed: int) -> Iterator[float]:
    """Yield slowdown factors without end: a moving block bootstrap of the measured ones, or 1.0 without any."""
    measured = profile.unsteadiness if isinstance(profile, TableProfile) else ()
    rng = random.Random(f"unsteadiness {seed}")
    while True:
        start = rng.randrange(max(len(measured) - NUM_CONSECUTIVE, 0) + 1)
        yield from measured[start : start + NUM_CONSECUTIVE] or (1.0,)


@dataclass(slots=True)
class CopyLog:
    """A log of copies by request, with the times of `CopyClock`: one copy at a time in each direction.

    A saved block is attributed to the request that held it last.
    """

    costs: CopyCosts
    block_size: int
    """Tokens per block."""
    copies: list[CopyResult] = field(default_factory=list)
    _holders: dict[int, str] = field(default_factory=dict)
    _out_free_s: float = 0.0

    def add_step(self, step: MeasuredStep, start_s: float) -> None:
        """Log the copies of a step: saves, held saves and loads. The saves wait for the held saves of the step before.

        Call it for every step, because each may allocate blocks to requests: held saves belong to the new holders.
        """
        copies = step.kv_connector_metadata
        saved = [self._holders.get(block, "") for block, _ in copies.saves]
        for request_id, blocks in _allocated_blocks(step):
            self._holders.update(dict.fromkeys(blocks, request_id.rpartition("#")[0]))
        held = [self._holders.get(block, "") for block, _ in copies.held_saves]
        loaded = [self._holders.get(block, "") for _, block in copies.loads]
        start_s = max(start_s, self._out_free_s)
        forward_s = self._add("to-host", saved, start_s, self.costs.out_s)
        self._out_free_s = self._add("to-host", held, forward_s, self.costs.out_s)
        in_s = forward_s if self.costs.is_overlapped else self._out_free_s
        self._add("to-device", loaded, in_s, self.costs.in_s)

    def _add(
        self,
        direction: Literal["to-host", "to-device"],
        holders: Sequence[str],
        start_s: float,
        seconds: Callable[[int], float],
    ) -> float:
        """Log a copy for each query in `holders`, which has one per block, one after the other; return the end.

        The first begins at `start_s`. Each takes its blocks' share of the seconds that all blocks take together.
        """
        if not holders:
            return start_s
        block_s = seconds(len(holders)) / len(holders)
        for query_id, blocks in groupby(sorted(holders)):
            num_blocks = len(list(blocks))
            end_s = start_s + num_blocks * block_s
            self.copies.append(CopyResult(query_id, direction, start_s, end_s, num_blocks * self.block_size))
            start_s = end_s
        return start_s


def _allocated_blocks(step: MeasuredStep) -> Iterator[tuple[str, list[int]]]:
    """Yield the id of each request in a step, new or known, with the blocks that the step allocates to it."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, [block for group in new.block_ids for block in group]
    cached = step.scheduled_cached_reqs
    for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, [block for group in groups or () for block in group]
