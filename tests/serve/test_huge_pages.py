import subprocess
import sys
from pathlib import Path

import pytest

from streamrag.serve import huge_pages

MOVING = """
import sys
from pathlib import Path
from streamrag.serve.huge_pages import collapse_memory
objects = [object() for _ in range(1_000_000)]
before = len(objects)
num_pages = collapse_memory()
(line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in line)
assert len({id(each) for each in objects}) == before
print(num_pages, line.split()[1])
"""


def test_objects_of_python_move_into_huge_pages() -> None:
    ran = subprocess.run([sys.executable, "-c", MOVING], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    num_pages, num_kib = map(int, ran.stdout.split())
    if not num_pages:
        pytest.skip("this kernel has no huge pages, or moves nothing into them")
    assert num_pages >= 7  # a million objects of 16 bytes each
    assert num_kib == num_pages * int((huge_pages.SETTINGS / "hpage_pmd_size").read_text()) // 1024


@pytest.mark.parametrize("setting", [None, "always madvise [never]"])
def test_no_memory_moves_where_huge_pages_are_missing_or_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    assert huge_pages.collapse_memory() == 0


def test_memory_stays_as_it_is_when_no_time_is_left() -> None:
    assert huge_pages.collapse_memory(within_s=-1) == 0
