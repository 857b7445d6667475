"""The trial of host memory, with tensors of a CPU. It sees what is wrong with the copies of an engine."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from streamrag.backends.vllm.worker import host_copier, host_probe
from streamrag.backends.vllm.worker.device_copies import CpuCopies, Pairs


def test_all_blocks_are_copied_both_ways() -> None:
    found = host_probe.try_copies(host_probe.make_caches("cpu", 20))
    assert (found["num_blocks_out"], found["num_blocks_in"]) == (20, 20)
    assert found["num_bytes_in"] == 20 * 4 * 65_536
    assert found["out_s"] > 0
    assert found["in_s"] > 0


@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.parametrize(
    ("is_last_left_out", "reason"), [(True, "do not have the bytes"), (False, "20 of 20 blocks were not copied")]
)
def test_a_block_that_is_not_copied_is_seen(
    monkeypatch: pytest.MonkeyPatch, direction: str, is_last_left_out: bool, reason: str
) -> None:
    copy = getattr(CpuCopies, direction)

    def faulty(self: CpuCopies, pairs: Pairs, **how: Any) -> None:
        if not is_last_left_out:
            raise RuntimeError("resource already mapped")
        copy(self, pairs[:-1], **how)

    monkeypatch.setattr(CpuCopies, direction, faulty)
    with pytest.raises(RuntimeError, match=reason):
        host_probe.try_copies(host_probe.make_caches("cpu", 20))


def test_the_trial_of_host_memory_finds_one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = CpuCopies.load

    def faulty(self: CpuCopies, pairs: Pairs, *, by_layer: bool) -> None:
        copy(self, pairs, by_layer=by_layer)
        self._rows[3][0][7, 65_535] ^= 1

    monkeypatch.setattr(CpuCopies, "load", faulty)
    with pytest.raises(RuntimeError, match="do not have the bytes"):
        host_probe.try_copies(host_probe.make_caches("cpu", 20))


def test_host_memory_that_cannot_be_pinned_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        if num_bytes:
            raise RuntimeError("cudaHostRegister failed")
        return torch.empty(0, dtype=torch.uint8)

    monkeypatch.setattr(host_copier, "_host_memory", refuse)
    with pytest.raises(RuntimeError, match="only 0 of 20 blocks of host memory could be pinned"):
        host_probe.try_copies(host_probe.make_caches("cpu", 20))
