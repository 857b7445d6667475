import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from streamrag.support import temp_dirs as scratch
from streamrag.support.temp_dirs import OWNER, ScratchFolder, remove_left_behind

OWNING = """
import sys
from streamrag.support.temp_dirs import ScratchFolder
folder = ScratchFolder("test")
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner() -> tuple["subprocess.Popen[str]", Path]:
    """A program with a folder, and the folder."""
    program = subprocess.Popen([sys.executable, "-c", OWNING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout
    return program, Path(program.stdout.readline().strip())


def killed(program: "subprocess.Popen[str]") -> None:
    program.kill()
    program.communicate()


def test_a_folder_is_private_and_removed_with_what_is_in_it(temporary_folder: Path) -> None:
    folder = ScratchFolder("test")
    assert folder.path.parent == temporary_folder
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    remove_left_behind("test")
    assert (folder.path / "file").exists()
    folder.remove()
    folder.remove()
    assert os.listdir(temporary_folder) == []


def test_a_folder_that_was_not_removed_is_removed_at_exit(temporary_folder: Path) -> None:
    program, path = owner()
    assert path.is_dir()
    program.communicate()
    assert os.listdir(temporary_folder) == []


def test_only_a_killed_owners_folder_is_removed_and_only_of_the_same_kind(temporary_folder: Path) -> None:
    living, of_the_living = owner()
    dead, of_the_dead = owner()
    killed(dead)
    assert (of_the_dead / "file").exists()
    remove_left_behind("other")
    assert of_the_dead.exists()
    remove_left_behind("test")
    assert os.listdir(temporary_folder) == [of_the_living.name]
    killed(living)


def test_a_folder_is_its_owners_as_long_as_a_fork_of_it_lives(temporary_folder: Path) -> None:
    folder = ScratchFolder("test")
    reading, writing = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.close(folder._owner)
    remove_left_behind("test")
    assert folder.path.exists()
    os.close(writing)
    os.waitpid(fork, 0)
    remove_left_behind("test")
    assert os.listdir(temporary_folder) == []
    folder._remove.detach()


def strange_folder(path: Path) -> None:
    path.mkdir()


def of_another_user(path: Path) -> None:
    path.mkdir()
    (path / OWNER).touch()
    os.chown(path, 12345, 12345)


def link_to_a_left_one(path: Path) -> None:
    real = path.with_name("mine")
    real.mkdir()
    (real / OWNER).touch()
    path.symlink_to(real)


def link_as_owner(path: Path) -> None:
    path.mkdir()
    path.with_name("mine").touch()
    (path / OWNER).symlink_to(path.with_name("mine"))


@pytest.mark.parametrize("make", [strange_folder, link_to_a_left_one, link_as_owner, of_another_user, Path.touch])
def test_a_folder_that_is_not_surely_ours_stays(temporary_folder: Path, make: Callable[[Path], None]) -> None:
    if make is of_another_user and os.geteuid():
        pytest.skip("only root can give a folder away")
    path = temporary_folder / "streamrag-test-12345678"
    make(path)
    before = sorted(temporary_folder.rglob("*"))
    remove_left_behind("test")
    assert sorted(temporary_folder.rglob("*")) == before


def test_a_longer_name_is_not_ours(temporary_folder: Path) -> None:
    (temporary_folder / "streamrag-test-my_notes_of_today").mkdir()
    (temporary_folder / "streamrag-test-my_notes_of_today" / OWNER).touch()
    remove_left_behind("test")
    assert len(os.listdir(temporary_folder)) == 1


def test_links_in_a_folder_that_is_removed_are_not_followed(temporary_folder: Path) -> None:
    dead, path = owner()
    mine = temporary_folder / "mine"
    mine.mkdir()
    (mine / "file").touch()
    (path / "link").symlink_to(mine)
    killed(dead)
    remove_left_behind("test")
    assert not path.exists()
    assert (mine / "file").exists()


def test_a_folder_that_is_taken_for_left_behind_before_it_is_locked_is_made_anew(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    lock = scratch._lock

    def lock_late(file: int, path: Path) -> bool:
        if not found:
            found.append(path.parent)
            remove_left_behind("test")
        return lock(file, path)

    monkeypatch.setattr(scratch, "_lock", lock_late)
    folder = ScratchFolder("test")
    assert folder.path not in found
    assert os.listdir(temporary_folder) == [folder.path.name]
    folder.remove()


def test_no_folder_is_removed_where_files_cannot_be_locked(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, path = owner()
    killed(dead)

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    folder = ScratchFolder("test")
    remove_left_behind("test")
    assert set(os.listdir(temporary_folder)) == {path.name, folder.path.name}
    folder.remove()


def test_a_folder_that_another_program_holds_is_waited_for_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "HELD_FOR_S", 0.2)
    (tmp_path / "index").mkdir()
    with scratch.folder_lock(tmp_path / "index"):
        with pytest.raises(OSError, match="held by another program"):
            with scratch.folder_lock(tmp_path / "index"):
                pass
    with scratch.folder_lock(tmp_path / "index"):
        (tmp_path / "index").rename(tmp_path / "elsewhere")
    with scratch.folder_lock(tmp_path / "elsewhere"):
        pass


def failing_in(beside: Path) -> Path:
    """The folder of a block that raised."""
    with suppress(ZeroDivisionError), scratch.locked_folder(beside, ".index.building-", kept=["kept"]) as folder:
        (folder / "kept").write_text("a start")
        (folder / "other").mkdir()
        raise ZeroDivisionError
    return folder


def test_a_link_is_not_kept_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("ten years of work")
    left = tmp_path / ".index.building-0123abcd"
    left.mkdir()
    (left / "kept").symlink_to(tmp_path / "precious")
    with scratch.locked_folder(tmp_path, ".index.building-", kept=["kept"]) as folder:
        assert list(folder.iterdir()) == []
        (folder / "kept").write_text("a start")
    assert not folder.exists()
    assert (tmp_path / "precious").read_text() == "ten years of work"
    folder = failing_in(tmp_path)
    assert os.listdir(folder) == ["kept"]
    with scratch.locked_folder(tmp_path, ".index.building-", kept=["kept"]) as again:
        assert again == folder
        with scratch.locked_folder(tmp_path, ".index.building-", kept=["kept"]) as other:
            assert other != folder
