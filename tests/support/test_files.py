import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrag.errors import ConfigurationError
from streamrag.support.files import atomic_replace, exchange_folders, write_atomic


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file may be larger, which looks to a program like a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomic(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_atomic(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert os.listdir(tmp_path) == ["file.txt"]
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode), "as any file that is new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode_and_is_never_read_by_others_meanwhile(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("a secret")
    path.chmod(mode)
    with atomic_replace(path) as unfinished:
        assert stat.S_IMODE(unfinished.stat().st_mode) == 0o600
        unfinished.write_text("another")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "another"


@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)
    with disk_of(100), pytest.raises(ConfigurationError, match=rf"^{path} cannot be written: File too large$"):
        write_atomic(path, "x" * 1_000)
    assert [name.read_text() for name in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none/file cannot be written: No such file"):
        write_atomic(tmp_path / "none" / "file", "text")


def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(ConfigurationError, match="/dev/full cannot be written: No space left on device"):
        write_atomic(Path("/dev/full"), "text")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    with atomic_replace(Path("/dev/null")) as path:
        assert path == Path("/dev/null")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_an_interrupted_block_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def interrupted() -> None:
        with atomic_replace(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------- what the program writes

TRACES = Path(__file__).parents[2] / "traces"


@pytest.mark.parametrize(
    "command",
    [
        "trace show {trace} --plot {out}/picture.png",
        "trace generate crawler --queries 50 --output {out}/trace.jsonl",
        pytest.param(
            "bench simulate --workload crawler --qps 4 --queries 30 --seeds 1 --output {out}", marks=pytest.mark.long
        ),
    ],
    ids=lambda command: "-".join(command.split()[:2]),
)
def test_a_command_on_a_full_disk_says_so_and_leaves_no_part_of_a_file(tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    ran = run_on_a_full_disk([part.format(out=out, trace=a_trace()) for part in command.split()])
    assert ran.returncode == 1, ran.stderr
    assert "cannot be written: File too large" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert [path for path in out.rglob("*") if path.is_file() and path.parent.name != "logs"] == []


def test_the_old_picture_stays_on_a_full_disk(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"the old one")
    ran = run_on_a_full_disk(["trace", "show", str(a_trace()), "--plot", str(picture)])
    assert ran.returncode == 1
    assert f"{picture} cannot be written: File too large; name another place with --plot" in ran.stderr
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"the old one"]


def a_trace() -> Path:
    return sorted(TRACES.glob("*.jsonl*"))[0]


def run_on_a_full_disk(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    program = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (3_000, 3_000))\n" + (
        "from streamrag.cli import main; raise SystemExit(main())"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("at_once", [True, False])
def test_two_folders_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    if not at_once:  # as on NFS
        monkeypatch.setattr("streamrag.support.files._exchange_at_once", lambda one, other: False)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange_folders(tmp_path / "one", tmp_path / "other")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "one",
        "one/other",
        "other",
        "other/one",
    ]
    with pytest.raises(OSError, match="No such file"):
        exchange_folders(tmp_path / "none", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]
