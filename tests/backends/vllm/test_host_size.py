"""How much host memory is taken where nobody says."""

from pathlib import Path

import pytest

from streamrag.backends.vllm import facts
from streamrag.backends.vllm.facts import host_bytes, num_host_blocks


def test_the_size_of_host_memory_that_the_user_sets_counts() -> None:
    assert num_host_blocks(1_000, block_bytes=10, num_device_blocks=1, num_workers=8) == 100


@pytest.mark.parametrize(
    ("num_device_blocks", "num_workers", "expected"), [(10_000, 1, 250), (10_000, 2, 125), (7, 2, 42)]
)
def test_host_memory_defaults_to_a_bounded_share_of_the_machine(
    num_device_blocks: int, num_workers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "host_bytes", lambda: 10_000)
    assert num_host_blocks(None, 10, num_device_blocks, num_workers) == expected


def test_a_container_has_what_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, no_limit = tmp_path / "limit", tmp_path / "no limit"
    limit.write_text("12345678\n")
    no_limit.write_text("max\n")
    monkeypatch.setattr(facts, "CGROUP_LIMITS", (no_limit, tmp_path / "missing"))
    assert host_bytes() > 1 << 28
    monkeypatch.setattr(facts, "CGROUP_LIMITS", (no_limit, limit))
    assert host_bytes() == 12_345_678
