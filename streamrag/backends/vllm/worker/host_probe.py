"""A trial of host memory for KV, in a process that may die of it: `client.host_memory` runs `main`."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  loads the kernels, which takes seconds, before the time of the copies begins

from streamrag.backends.vllm.copy_wire import HostCopies
from streamrag.backends.vllm.worker.host_copier import HostCopier

NUM_BLOCKS, NUM_LAYERS = 200, 4
BLOCK_SHAPE = (8, 16, 256)  # heads, tokens, key and value; with 2 bytes each, a block of a layer of Llama 3.1 8B
ALLOCATION_BYTES = 64 << 20  # more than torch has left over, so that the driver allocates


def make_caches(device: str, num_blocks: int) -> dict[str, torch.Tensor]:
    """Return random KV for each layer."""
    shape = (num_blocks, *BLOCK_SHAPE)
    return {f"layer {n}": torch.randint(1 << 15, shape, dtype=torch.int16, device=device) for n in range(NUM_LAYERS)}


def try_copies(caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copy all blocks to host memory and back to other places, as a worker does; return numbers and times of copies.

    :raises RuntimeError: host memory cannot be pinned, a copy fails, or bytes are not what they were.
    """
    device, num_blocks = next((cache.device, len(cache)) for cache in caches.values())
    back_to = {block: -block % num_blocks for block in range(num_blocks)}
    expected = {name: cache.cpu()[list(back_to.values())] for name, cache in caches.items()}
    copier = HostCopier(num_blocks, num_blocks)
    copier.register(caches)
    if copier.num_slots < num_blocks:
        raise RuntimeError(f"only {copier.num_slots} of {num_blocks} blocks of host memory could be pinned")
    saves = [(block, num_blocks - 1 - block) for block in back_to]
    copier.save(HostCopies(saves=saves[::2], held_saves=saves[1::2]))
    copier.end_step()
    copier.save(HostCopies())  # begins the next step, which waits for the held saves
    allocated = [torch.ones(ALLOCATION_BYTES, dtype=torch.uint8, device=device)]
    for cache in caches.values():
        cache.zero_()
    copier.load(HostCopies(loads=[(slot, back_to[block]) for block, slot in saves]), by_layer=True)
    for name in caches:
        copier.wait_for_layer(name)
    copier.end_step()
    allocated += [torch.ones(ALLOCATION_BYTES, dtype=torch.uint8, device=device)]
    are_right = all(torch.equal(cache.cpu(), expected[name]) for name, cache in caches.items())
    failed, report = copier.take_failed_loads(), copier.take_report()
    copier.close()
    if failed or report is None or report.failed:
        raise RuntimeError(f"{len(failed) or num_blocks} of {num_blocks} blocks were not copied")
    if not are_right:
        raise RuntimeError("copied blocks do not have the bytes that they had before")
    return {name: value for name, value in asdict(report).items() if name.startswith(("num_b", "out_", "in_"))}


def main(ready: str, device: str = "cuda", num_blocks: int = NUM_BLOCKS) -> None:
    """Print `ready`, then the result of `try_copies` as JSON, and end the process. If it fails, print the reason, and
    end with status 1, or with 2 if the device has no memory left."""
    caches = make_caches(device, num_blocks)
    print(ready, flush=True)
    status = 0
    try:
        print(json.dumps(try_copies(caches)))
    except Exception as error:  # any failure is a result
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        status = 2 if isinstance(error, torch.OutOfMemoryError) else 1
    sys.stdout.flush()
    os._exit(status)  # without a teardown, like the processes of an engine
