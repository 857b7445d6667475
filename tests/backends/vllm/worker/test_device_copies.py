"""Do copies on CUDA wait for all that they must wait for? Tried in many of the orders that a device may choose, and
with mutants that wait for less.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from simulated_cuda import Device, Memory, Rows

from streamrag.backends.vllm.worker.device_copies import Layer

device_copies = pytest.importorskip("streamrag.backends.vllm.worker.device_copies")
custom_ops = pytest.importorskip("vllm._custom_ops")

LAYERS = ("layers.0", "layers.1", "layers.2")
NUM_BLOCKS, NUM_SLOTS, NUM_STEPS = 8, 8, 12
NUM_SEEDS = 300


@dataclass(frozen=True)
class Step:
    """What the scheduler may ask of a worker in one step."""

    saves: list[tuple[int, int]]
    """Saves of blocks that the step overwrites."""
    held_saves: list[tuple[int, int]]
    """Saves of blocks that nothing overwrites in this step."""
    loads: list[tuple[int, int]]
    """Loads of slots that were saved in an earlier step, into blocks of this one."""
    written: list[int]
    by_layer: bool
    layers: tuple[str, ...]
    """That the forward has; the others are left out."""


def make_steps(rng: random.Random) -> Iterator[Step]:
    saved: set[int] = set()
    for _ in range(NUM_STEPS):
        blocks, slots = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), rng.sample(range(NUM_SLOTS), NUM_SLOTS)
        loaded = [slot for slot in slots[:3] if slot in saved]
        to_save = [slot for slot in slots if slot not in loaded]
        overwritten, kept = blocks[:4], blocks[4:]
        saves = list(zip(overwritten[: rng.randrange(4)], to_save, strict=False))
        held_saves = list(zip(kept[: rng.randrange(3)], to_save[len(saves) :], strict=False))
        loads = list(zip(loaded, overwritten, strict=False))
        written = overwritten[len(loads) :]
        by_layer = rng.random() < 0.5
        layers = tuple(name for name in LAYERS if not by_layer or rng.random() < 0.8)
        yield Step(saves, held_saves, loads, written, by_layer, layers)
        saved |= {slot for _, slot in (*saves, *held_saves)}


def read_by_kernels(module: ModuleType, steps: list[Step], device: Device) -> tuple[list[Any], Memory, Any]:
    """What each layer's computation saw of the KV, step by step; what is in host memory in the end, and what was
    measured."""
    vars(module)["torch"] = device.torch
    caches: Memory = {name: Rows(f"{name} block {b}" for b in range(NUM_BLOCKS)) for name in LAYERS}
    pools: Memory = {name: Rows(f"{name} slot {s}" for s in range(NUM_SLOTS)) for name in LAYERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_ops, "swap_blocks", device.swap_blocks)
        layers: Any = {name: Layer(caches[name], pools[name]) for name in LAYERS}  # type: ignore[arg-type]
        copies = module.CudaCopies(layers)
    seen: list[Any] = []
    for number, step in enumerate(steps):
        copies.start_step()
        if step.saves:
            copies.save(step.saves, is_held=False)
        if step.held_saves:
            copies.save(step.held_saves, is_held=True)
        if step.loads:
            copies.load(step.loads, by_layer=step.by_layer)
        for name in step.layers:
            if step.by_layer:
                copies.wait_for_layer(name)
            device.compute.issue(kernel(f"step {number}", caches[name], step.written, seen))
        copies.end_step()
    copies.close()
    device.synchronize()
    return seen, pools, copies.take_measured()


def kernel(name: str, cache: list[Any], written: list[int], seen: list[Any]) -> Callable[[], None]:
    def run() -> None:
        seen.append(list(cache))
        for block in written:
            cache[block] = f"{name} block {block}"

    return run


def is_right(module: ModuleType, seed: int) -> bool:
    steps = list(make_steps(random.Random(seed)))
    expected = read_by_kernels(module, steps, Device(None))
    return read_by_kernels(module, steps, Device(random.Random(seed))) == expected


def module_of(source: str) -> ModuleType:
    module = ModuleType("device_copies")
    exec(compile(source, device_copies.__file__, "exec"), vars(module))
    return module


SOURCE = inspect.getsource(device_copies)


def test_blocks_are_never_copied_too_early_nor_read_before_they_are_there() -> None:
    module = module_of(SOURCE)
    assert [seed for seed in range(NUM_SEEDS) if not is_right(module, seed)] == []


def test_all_copies_are_measured() -> None:
    steps = list(make_steps(random.Random(0)))
    _, _, (out, into) = read_by_kernels(module_of(SOURCE), steps, Device(random.Random(0)))
    num_saves = [len(pairs) for step in steps for pairs in (step.saves, step.held_saves) if pairs]
    num_loads = [len(step.loads) for step in steps if step.loads]
    assert out == (sum(num_saves), len(num_saves))  # each copy takes a simulated second
    assert into == (sum(num_loads), len(num_loads))


def without(line: str, *, before: str = "") -> str:
    """The module's source without a line that waits. `before` tells it from others that are like it."""
    assert SOURCE.count(before + line) == 1
    return SOURCE.replace(before + line, f"{before}pass\n")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            without("torch.cuda.current_stream().wait_event(self._held)\n"),
            id="held blocks are overwritten in the next step",
        ),
        pytest.param(without("self._out.wait_stream(compute)\n"), id="blocks are saved before they are computed"),
        pytest.param(
            without("compute.wait_event(ended)\n", before="self._held = ended\n        else:\n            "),
            id="blocks are overwritten before they are saved",
        ),
        pytest.param(without("self._in.wait_stream(compute)\n"), id="blocks are loaded that are still read"),
        pytest.param(
            without("compute.wait_event(ended)\n", before="if not by_layer:\n            "),
            id="a whole forward does not wait for its loads",
        ),
        pytest.param(
            without("torch.cuda.current_stream().wait_event(self._loaded[name])\n"),
            id="a layer does not wait for its loads",
        ),
        pytest.param(
            without("torch.cuda.current_stream().wait_stream(self._in)"),
            id="nothing waits for the loads of a layer that is left out",
        ),
    ],
)
def test_each_wait_of_the_copies_is_needed(source: str) -> None:
    mutant = module_of(source)
    assert not all(is_right(mutant, seed) for seed in range(NUM_SEEDS))
