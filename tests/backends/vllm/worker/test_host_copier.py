"""What a worker copies out comes back as it was, and what fails is said."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.worker.host_copier import HostCopier
from streamrag.errors import ConfigurationError
from tests.backends.vllm.swapping import make_faulty

NUM_BLOCKS = 10
SHAPE = (NUM_BLOCKS, 2, 8, 6)  # blocks, heads, tokens, content, as vLLM shows it
BLOCK_BYTES = 2 * 8 * 6 * 4


def made_caches(num_layers: int = 3, order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, torch.Tensor]:
    """In memory the dimensions are in this order; the first is the outermost."""
    back = [order.index(dim) for dim in range(4)]
    return {f"layer{i}": torch.rand([SHAPE[dim] for dim in order]).permute(back) for i in range(num_layers)}


def made_copier(caches: dict[str, torch.Tensor], num_slots: int = 20) -> HostCopier:
    copier = HostCopier(num_slots, NUM_BLOCKS)
    copier.register(caches)
    return copier


def step(copier: HostCopier, **copies: list[tuple[int, int]]) -> tuple[CopyReport, set[int]]:
    """One step of an engine, in which the forward does nothing. What is reported then."""
    of_step = HostCopies(**copies)
    copier.save(of_step)
    copier.load(of_step, by_layer=True)
    copier.wait_for_layer("layer0")
    copier.end_step()
    return copier.take_report() or CopyReport(), copier.take_failed_loads()


def overwrite(caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What they were before."""
    before = {name: cache.clone() for name, cache in caches.items()}
    for cache in caches.values():
        cache.fill_(-1.0)
    return before


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("kind", ["saves", "held_saves"])
def test_saved_blocks_come_back_bit_by_bit_after_being_overwritten(order: tuple[int, ...], kind: str) -> None:
    caches = made_caches(order=order)
    copier = made_copier(caches)
    saved, _ = step(copier, **{kind: [(7, 0), (2, 19), (3, 5)]})
    assert saved.saved == [0, 19, 5]
    before = overwrite(caches)
    step(copier, loads=[(19, 4), (0, 7), (5, 9)])  # one of them into its own place
    for name, cache in caches.items():
        assert torch.equal(cache[[4, 7, 9]], before[name][[2, 7, 3]])
        assert (cache[[0, 1, 2, 3, 5, 6, 8]] == -1.0).all()


def test_a_slot_that_is_loaded_and_one_that_takes_its_block_meet_in_one_step() -> None:
    caches = made_caches()
    copier = made_copier(caches)
    step(copier, saves=[(1, 0)])
    first = overwrite(caches)
    for cache in caches.values():
        cache[1] = 5.0
    step(copier, saves=[(1, 1)], loads=[(0, 1)])
    step(copier, loads=[(1, 2)])
    for name, cache in caches.items():
        assert torch.equal(cache[1], first[name][1])
        assert (cache[2] == 5.0).all()


def test_blocks_of_the_scheduler_may_be_several_of_the_kernel() -> None:
    caches = {"layer0": torch.rand(NUM_BLOCKS * 4, 2, 8, 6)}
    copier = made_copier(caches)
    step(copier, saves=[(3, 1)])
    before = overwrite(caches)
    step(copier, loads=[(1, 0)])
    assert torch.equal(caches["layer0"][0:4], before["layer0"][12:16])
    assert (caches["layer0"][4:] == -1.0).all()


def test_kv_that_layers_share_is_copied_once() -> None:
    caches = made_caches(num_layers=2)
    caches["shares"] = caches["layer0"]
    assert made_copier(caches).block_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_any_type_of_element_will_do(dtype: torch.dtype) -> None:
    cache = torch.randint(0, 255, (*SHAPE[:3], SHAPE[3] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    before = cache.view(torch.uint8).clone()
    copier = made_copier({"layer0": cache})
    step(copier, saves=[(3, 1)])
    step(copier, loads=[(1, 8)])
    assert torch.equal(cache.view(torch.uint8)[8], before[3])


def test_a_block_that_is_in_pieces_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"layer0 has \(10, 2, 8, 6\) .*VLLM_KV_CACHE_LAYOUT"):
        made_copier(made_caches(order=(1, 0, 2, 3)))


def test_copies_are_counted_and_timed_once() -> None:
    copier = made_copier(made_caches())
    report, _ = step(copier, saves=[(7, 0), (2, 1)], held_saves=[(3, 2)])
    assert (report.num_blocks_out, report.num_bytes_out) == (3, 3 * 3 * BLOCK_BYTES)
    assert report.out_s > 0
    assert (report.num_blocks_in, report.num_bytes_in, report.in_s) == (0, 0, 0.0)
    report, _ = step(copier, loads=[(1, 5), (2, 6)])
    assert (report.num_blocks_in, report.num_bytes_in) == (2, 2 * 3 * BLOCK_BYTES)
    assert report.in_s > 0
    assert (report.saved, report.num_blocks_out, report.out_s) == ([], 0, 0.0)
    assert copier.take_report() is None


def test_a_failed_copy_is_reported_and_harms_no_other_block() -> None:
    caches = made_caches()
    copier = made_copier(caches)
    make_faulty(copier, 3, 2)
    report, _ = step(copier, saves=[(0, 10), (1, 11), (2, 12), (3, 13)])
    assert (report.saved, report.failed) == ([10, 11, 13], [12])
    before = overwrite(caches)
    report, failed = step(copier, loads=[(10, 5), (11, 6), (13, 7)])
    assert failed == {6}
    assert report.num_blocks_in == 2
    assert copier.take_failed_loads() == set()
    for name, cache in caches.items():
        assert torch.equal(cache[[5, 7]], before[name][[0, 3]])


def test_an_error_fails_what_it_may_have_touched_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caches = made_caches()
    copier = made_copier(caches)
    step(copier, saves=[(0, 0)])
    report, _ = step(copier, saves=[(1, 1), (NUM_BLOCKS, 2)], held_saves=[(3, 3)])
    assert (report.saved, report.failed) == ([3], [1, 2])
    _, failed = step(copier, loads=[(3, 5), (0, NUM_BLOCKS)])
    assert failed == {5, NUM_BLOCKS}
    assert "2 KV blocks were not saved" in caplog.text
    assert "2 KV blocks were not loaded" in caplog.text
    _, failed = step(copier, loads=[(0, 6)])
    assert failed == set()
    assert all(torch.equal(cache[6], cache[0]) for cache in caches.values())


def test_a_machine_with_less_memory_gets_fewer_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    available = 6 * 3 * BLOCK_BYTES  # for 6 blocks
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    caches = made_caches()
    copier = made_copier(caches, num_slots=20)
    assert copier.num_slots == 5
    assert "5 KV blocks of 1152 bytes instead of 20; lower host_kv_bytes" in caplog.text
    report, _ = step(copier, saves=[(0, 4), (1, 5), (2, 19)])
    assert (report.saved, report.failed, report.num_slots) == ([4], [5, 19], 5)
    _, failed = step(copier, loads=[(4, 7), (5, 8)])
    assert failed == {8}
    assert all(torch.equal(cache[7], cache[0]) for cache in caches.values())


def test_without_memory_everything_fails_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    copier = made_copier(made_caches())
    report, failed = step(copier, saves=[(0, 0)], loads=[(1, 1)])
    assert (report.saved, report.failed, report.num_slots) == ([], [0], 0)
    assert failed == {1}


def test_a_block_counts_as_saved_if_every_worker_has_saved_it() -> None:
    one = CopyReport([1, 2, 3], [4], 3, 1, 300, 100, 0.5, 0.1)
    other = CopyReport([2, 3, 4], [1], 3, 2, 300, 200, 0.4, 0.3, num_slots=7)
    expected = CopyReport([2, 3], [1, 4], 3, 2, 600, 300, 0.5, 0.3, num_slots=7)
    assert one.aggregate(other) == expected
    assert other.aggregate(one) == expected


def test_without_kv_that_it_can_copy_nothing_is_promised() -> None:
    copier = HostCopier(0, NUM_BLOCKS)
    assert step(copier) == (CopyReport(), set())
    report, failed = step(copier, saves=[(0, 0)], loads=[(0, 1)])
    assert (report.failed, failed) == ([0], {1})
