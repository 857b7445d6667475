"""What goes wrong with copies on a real engine. It is made in the engine's own processes, from its name."""

import random
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from streamrag.backends.vllm.connector import HostKVConnector
from streamrag.backends.vllm.copy_wire import HostCopies
from streamrag.backends.vllm.worker.host_copier import HostCopier


class CopyFaults:
    """What vLLM's worker can do besides, when a test calls it: see `AsyncLLM.collective_rpc`."""

    def set_copy_faults(self, fail_saves: int = 0, fail_loads: int = 0, confuses_loads: bool = False) -> None:
        """From now on; of so many copies of a block, one fails. Zero: none does."""
        connector = get_kv_transfer_group()
        assert type(connector) is HostKVConnector
        copier = connector.copier
        make_faulty(copier, fail_saves, fail_loads)
        copier.__dict__.pop("load", None)
        if confuses_loads:
            copier.__dict__["load"] = _confused(copier)


def make_faulty(copier: HostCopier, fail_saves: int = 0, fail_loads: int = 0) -> None:
    """From now on, of so many saves and loads of a block one fails; none if it is 0."""
    num_asked = {False: 0, True: 0}

    def has_slot(slot: int, *, is_load: bool) -> bool:
        every = fail_loads if is_load else fail_saves
        num_asked[is_load] += slot < copier.num_slots
        return slot < copier.num_slots and not (every and num_asked[is_load] % every == 0)

    copier.has_slot = has_slot  # type: ignore[method-assign]


def _confused(copier: HostCopier) -> Callable[..., None]:
    """Loads every second block or so from the slot of another, and says nothing."""
    load = copier.load

    def load_wrong(copies: HostCopies, **keywords: Any) -> None:
        rng = random.Random(len(copies.loads))
        loads = [(slot if rng.random() > 0.5 else slot // 2, block) for slot, block in copies.loads]
        load(HostCopies(copies.saves, loads, copies.held_saves), **keywords)

    return load_wrong
