# mypy: no-warn-return-any
"""Our scheduler, which copies KV to host memory in some steps and not in others, and takes down how long each takes.

    step     0   1   2   3 │ 4   5   6   7 │ 8   9  10  11 │ ...
    copies   no            │ yes           │ no            │          while the file `on` is in the folder

For `scheduler_cls` of `copy_overlap.py`, which gives in `additional_config` the folder, and the most tokens a
step to copy.
"""

import json
from collections import deque
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.scheduler.hooks import StreamingHooks, streaming_scheduler
from streamrag.backends.vllm.scheduler.host_memory.costs import parts_of
from streamrag.engine.recompute_or_swap import SwapAlways

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

KEY = "copy_overlap"
PHASE = 4
"""Steps in a row that all copy, or that all do not."""
FEW_BLOCKS = 8
"""Copied in a step before it is known how long that takes."""


class Alternating(SwapAlways):
    """As many blocks are copied beside a step as are copied in the time that it takes without."""

    def __init__(self, on: Path, num_most: int) -> None:
        self._on = on
        self._num_most = num_most
        self.is_copying = False
        self._step_s: deque[float] = deque(maxlen=9)
        self._block_s: deque[float] = deque(maxlen=9)

    @property
    def block_s(self) -> float:
        """What copying a block takes; 0 if that is not known yet."""
        return median(self._block_s) if self._block_s else 0.0

    def num_to_write_through(self, share_free: float) -> int:
        if not (self.is_copying and self._on.exists()):
            return 0
        num = int(median(self._step_s) / self.block_s) if self._block_s and self._step_s else FEW_BLOCKS
        return min(num, self._num_most)

    def copied(self, report: CopyReport) -> None:
        """Told how long copies took."""
        if report.num_blocks_out:
            self._block_s.append(report.out_s / report.num_blocks_out)

    def took(self, duration_s: float) -> None:
        """Told of each step that computes and copies nothing."""
        self._step_s.append(duration_s)


def scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> StreamingHooks:
    """For `scheduler_cls`."""
    made = streaming_scheduler(vllm_config, **kwargs)
    memory = made.plugin.host_memory
    assert memory is not None
    assert isinstance(vllm_config.additional_config, dict)
    folder, num_tokens = vllm_config.additional_config[KEY]
    choice = Alternating(Path(folder) / "on", num_tokens // vllm_config.cache_config.block_size)
    memory.choice = choice
    log = (Path(folder) / "steps.jsonl").open("a", buffering=1)
    num_planned = 0
    take_copies, on_report, on_step_end = memory.take_copies, memory.on_report, memory.on_step_end

    def plan_copies(step: "SchedulerOutput") -> HostCopies:
        nonlocal num_planned
        choice.is_copying = num_planned // PHASE % 2 == 1
        num_planned += step.total_num_scheduled_tokens > 0
        return take_copies(step)

    def note_copies(report: CopyReport) -> None:
        on_report(report)
        choice.copied(report)

    def note_step(step: "SchedulerOutput", output: Any, duration_s: float) -> None:
        on_step_end(step, output, duration_s)
        if not step.total_num_scheduled_tokens:
            return
        num_blocks = len(step.kv_connector_metadata.held_saves)
        if not num_blocks:
            choice.took(duration_s)
        parts = [part for _, part in parts_of(step)]
        line = {
            "num_tokens": sum(num_new for num_new, _ in parts),
            "num_requests": len(parts),
            "num_blocks": num_blocks,
            "duration_s": duration_s,
            "copies_s": num_blocks * choice.block_s,
        }
        log.write(json.dumps(line) + "\n")

    replacements = {"take_copies": plan_copies, "on_report": note_copies, "on_step_end": note_step}
    for name, replacement in replacements.items():
        setattr(memory, name, replacement)
    return made
