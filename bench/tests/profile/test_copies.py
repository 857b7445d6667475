from dataclasses import replace

import pytest

from streamrag.backends.vllm.facts import EngineFacts
from streamrag_bench.profile.copies import CopyTimes, block_counts, measure_copies

FACTS = EngineFacts(
    model="tiny",
    dtype="float32",
    is_cuda=False,
    device="CPU",
    num_cores=2,
    tensor_parallel_size=1,
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    kv_dtype="float32",
    kv_dtype_bytes=4,
    block_size=32,
    max_model_len=1_000,
    max_num_batched_tokens=512,
    model_runner="V1",
    max_num_seqs=8,
)


def test_a_block_is_the_keys_and_values_of_all_layers() -> None:
    assert FACTS.block_bytes == 2 * 2 * 2 * 32 * 32 * 4


@pytest.mark.parametrize(
    ("longest", "block_size", "expected"),
    [(1_000, 32, [1, 2, 4, 8, 16, 31]), (1_024, 32, [1, 2, 4, 8, 16, 32]), (20, 32, [1, 2])],
)
def test_blocks_are_counted_up_to_the_longest_prompt(longest: int, block_size: int, expected: list[int]) -> None:
    assert block_counts(replace(FACTS, max_model_len=longest, block_size=block_size)) == expected


def test_copies_are_no_larger_than_needed() -> None:
    large = replace(FACTS, num_layers=32, num_kv_heads=8, head_dim=128, max_model_len=1 << 20)
    assert block_counts(large)[-1] * large.block_bytes <= 256 << 20


def test_copies_of_a_cpu_are_measured() -> None:
    seen: list[int] = []
    found = measure_copies(FACTS, seen.append)
    assert seen == list(found.out) == list(found.into) == block_counts(FACTS)
    assert all(0 < seconds < 1 for times in (found.out, found.into) for each in times.values() for seconds in each)
    costs = found.costs()
    assert (costs.block_bytes, costs.is_overlapped) == (FACTS.block_bytes, False)
    assert 0 < costs.in_s(1) <= costs.in_s(31)


def test_the_lines_are_those_of_the_medians() -> None:
    times = CopyTimes(1_000, True, out={1: [0.1, 0.2, 0.9]}, into={1: [0.3]})
    assert (times.costs().out_points, times.costs().in_points) == (((1, 0.2),), ((1, 0.3),))
