"""Sessions whose text is on disk: closed, killed, torn, damaged, on a full disk."""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import pytest

from streamrag import Chunk, ConfigurationError, Pipeline, SamplingParams, SessionLogError
from streamrag.sessions import Session
from streamrag.sessions.log import SessionLog
from streamrag.sessions.log.file import LogFile, read_header
from streamrag.sessions.window import Numbered
from streamrag.support.tasks import cancel_and_wait
from streamrag.testing import ScriptedSource
from tests.sessions.test_faults import until
from tests.sessions.test_session import Engine, lines_of, settled

WINDOW = 300


def line(number: int) -> str:
    return f"{number}:" + "x" * (number * 7 % 40)


async def window_of(session: Session) -> list[str]:
    """The data that questions are asked about, at the newest version."""
    engine = session._data._backend
    assert isinstance(engine, Engine)
    await settled(session)
    return lines_of(engine.asked[-1])


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def opened(path: Path, **options: Any) -> Session:
    return Session(Engine(answer="yes"), log=path, window_tokens=WINDOW, **options)


def bytes_in(folder: Path) -> int:
    """Bytes of a log, with what SQLite keeps beside it."""
    return sum(each.stat().st_size for each in folder.iterdir() if not each.name.endswith("-shm"))


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """A log that is closed, as anybody may change it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


async def make_log(path: Path, num_lines: int = 3) -> None:
    async with opened(path, system="s") as session:
        for number in range(1, num_lines + 1):
            await session.append(line(number))
        await session.flush()


async def test_a_session_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "prices.log"
    async with Pipeline(ScriptedSource([]), Engine(answer="yes")) as pipeline:
        for begun in range(1, 120, 17):
            async with pipeline.session(system="Watch.", window_tokens=WINDOW, log=path) as session:
                assert session.state.num_appended == session.state.version == begun - 1
                for number in range(begun, begun + 17):
                    assert await session.append(Chunk(line(number), "feed", score=0.5)) == number
                before, state = await window_of(session), session.state
            async with pipeline.session(log=str(path)) as resumed:
                assert await window_of(resumed) == before
                assert (resumed.state.version, resumed.state.num_slid) == (state.version, state.num_slid)
                assert resumed.state.log is not None
                assert resumed.state.log.is_resumed
                assert "Watch." in pipeline.backend.asked[-1]
    assert state.num_slid > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names_in(tmp_path) == ["prices.log"]


async def test_dropped_data_stay_dropped_after_a_restart(tmp_path: Path) -> None:
    engine = Engine(answer="yes")
    async with Session(engine, log=tmp_path / "log", max_waiting=3) as session:
        await settled(session)
        engine.is_held = True
        for i in range(10):
            await session.append(f"line {i}")
            await anyio.wait_all_tasks_blocked()
        engine.is_held = False
        engine.go_on.set()
        before = await window_of(session)
    async with opened(tmp_path / "log") as resumed:
        assert await window_of(resumed) == before == ["line 0", "line 7", "line 8", "line 9"]
        assert (resumed.state.num_dropped, resumed.state.version) == (6, 10)


async def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.log.file.MAX_WAL_BYTES", 30_000)
    path = tmp_path / "log"
    sizes = []
    async with opened(path) as session:
        for number in range(1, 1500):
            await session.append(line(number))
            if number % 10 == 0:
                await settled(session)
                assert await session.flush() == number
                sizes.append(bytes_in(tmp_path))
        held = await window_of(session)
        assert max(sizes[40:]) < 30_000 + 60_000
    assert bytes_in(tmp_path) < 40_000
    async with opened(path) as resumed:
        assert await window_of(resumed) == held
        assert resumed.state.version == 1499


async def test_texts_that_have_gone_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with opened(path) as session:
        for number in range(10):
            await session.append(f"secret number {number:02}")
        await settled(session)
        await session.flush()
    async with Session(Engine(answer="yes"), log=path, window_tokens=40) as session:  # where few have room
        held = await window_of(session)
    content = path.read_bytes()
    there = [number for number in range(10) if f"secret number {number:02}".encode() in content]
    assert [f"secret number {number:02}" for number in there] == held
    assert 0 < len(held) < 4


KILLED = """
import asyncio, sys
from streamrag.sessions import Session
from streamrag.sessions.log import file
from streamrag.testing import ScriptedBackend

file.MAX_WAL_BYTES = 20_000  # copied into the database all the time

async def main():
    async with Session(ScriptedBackend(answer="yes"), log=sys.argv[1], window_tokens=300) as session:
        while True:
            number = session.state.num_appended + 1
            await session.append(f"{number}:" + "x" * (number * 7 % 40))
            if number % 3 == 0:
                print(await session.flush(), flush=True)

asyncio.run(main())
"""


def flushed_until_killed(path: Path, num_lines: int) -> int:
    """The newest version that it said was flushed; it is killed when it has said so `num_lines` times, or more."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(num_lines)]
        process.send_signal(signal.SIGKILL)
        return max(*flushed, *(int(each) for each in process.stdout if each.endswith("\n")), 0)


async def test_flushed_data_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for num_lines in (1, 2, 40, 75):
        flushed = flushed_until_killed(path, num_lines)
        async with opened(path) as resumed:
            version = resumed.state.num_appended
            assert version >= flushed
            async with opened(tmp_path / f"never-killed-{version}") as other:
                for number in range(1, version + 1):
                    await other.append(line(number))
                assert await window_of(resumed) == await window_of(other)
        assert not [name for name in names_in(tmp_path) if "writing" in name], "what was not finished is removed"


@pytest.mark.parametrize("num_bytes", [1, 2, 20, 5000])
async def test_a_transaction_that_was_not_finished_is_left_out(num_bytes: int, tmp_path: Path) -> None:
    path, torn = tmp_path / "log", tmp_path / "torn" / "log"
    torn.parent.mkdir()
    async with opened(path) as session:
        for number in range(1, 4):
            await session.append(line(number))
            await session.flush()
        for name in ("log", "log-wal"):  # as a killed process leaves them
            shutil.copy(tmp_path / name, torn.parent)
    wal = torn.with_name("log-wal")
    os.truncate(wal, wal.stat().st_size - num_bytes)
    async with opened(torn) as resumed:
        assert await window_of(resumed) == [line(1), line(2)]
        assert await resumed.append(line(3)) == 3
    async with opened(torn) as again:
        assert await window_of(again) == [line(1), line(2), line(3)]
    assert names_in(torn.parent) == ["log"]


async def test_flushed_data_survive_garbage_at_the_end_of_the_log(tmp_path: Path) -> None:
    """As on a disk that lost its power: what was not synced is garbage."""
    path, copy = tmp_path / "log", tmp_path / "copy" / "log"
    copy.parent.mkdir()
    async with opened(path) as session:
        await session.append(line(1))
        assert await session.flush() == 1
        for name in ("log", "log-wal"):
            shutil.copy(tmp_path / name, copy.parent)
    with copy.with_name("log-wal").open("ab") as file:
        file.write(os.urandom(10_000))
    async with opened(copy) as resumed:
        assert await window_of(resumed) == [line(1)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"my diary\n", "is no log of a session"),
        (b"root:x:0:0", "is no log of a session"),
        (b"\x00" * 4096, "is no log of a session"),
        (b"[" * 100_000 + b"\n", "is no log of a session"),
        (b"SQLite format 3\0" + b"\xff" * 5000, "is no log of a session|is damaged"),
    ],
)
async def test_a_file_that_is_something_else_is_explained_and_stays(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(SessionLogError, match=said):
            await opened(path).start()
        with pytest.raises(SessionLogError, match=said):
            read_header(path)
    assert path.read_bytes() == content
    assert names_in(tmp_path) == ["log"]


WATCH = "INSERT INTO watches VALUES ('a', '{}')"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("PRAGMA user_version = 2", "newer streamrag"),
        ("PRAGMA application_id = 5", "another program's database"),
        ("PRAGMA journal_mode = DELETE", "another program's database"),
        ("CREATE TRIGGER t AFTER DELETE ON chunks BEGIN DELETE FROM meta; END", "other tables"),
        ("CREATE VIEW v AS SELECT randomblob(1000000000)", "other tables"),
        ("CREATE INDEX i ON chunks(abs(number))", "other tables"),
        ("CREATE VIRTUAL TABLE f USING fts5(text)", "other tables"),
        ("ALTER TABLE chunks ADD COLUMN run AS (upper(text))", "other tables"),
        ("DROP TABLE watches", "other tables"),
        ("DELETE FROM meta", "meta: .*field required"),
        ("UPDATE meta SET value = -1 WHERE name = 'window_tokens'", "window_tokens"),
        ("UPDATE meta SET value = 1 WHERE name = 'slide_share'", "slide_share"),
        ("UPDATE meta SET value = 'many' WHERE name = 'num_slid'", "num_slid"),
        ("UPDATE meta SET value = 1e30 WHERE name = 'num_appended'", "num_appended"),
        ("INSERT INTO meta VALUES ('__class__', 'x')", "not known"),
        ("INSERT INTO meta VALUES (5, 5)", "not known"),
        ("INSERT INTO meta VALUES (NULL, 5)", "not known"),
        ("INSERT INTO chunks VALUES (4, 'a', '', '', 0, NULL)", "chunk 4: only 3 were appended"),
        ("INSERT INTO chunks VALUES (0, 'a', '', '', 0, NULL)", "chunk 0: only 3 were appended"),
        ("INSERT INTO chunks VALUES (-9223372036854775808, 'a', '', '', 0, NULL)", "chunk -9.*: only 3 were appended"),
        ("UPDATE chunks SET text = 5 WHERE number = 2", "chunk 2: text"),
        ("UPDATE chunks SET text = x'ff' WHERE number = 2", "chunk 2: text"),
        ("UPDATE chunks SET text = CAST(x'ff' AS TEXT) WHERE number = 2", "is damaged: .*UTF-8"),
        ("UPDATE chunks SET text = zeroblob(17000000) WHERE number = 2", "too big"),
        ("UPDATE chunks SET uri = NULL WHERE number = 2", "chunk 2: uri"),
        ("UPDATE chunks SET passage = -1 WHERE number = 2", "chunk 2: .*passage"),
        ("UPDATE chunks SET score = 'high' WHERE number = 2", "chunk 2: score"),
        (WATCH, "watch 'a': question"),
        (WATCH.replace("'a'", "NULL"), "watch None: .*no text"),
        (WATCH.replace("'{}'", "x'00'"), "watch 'a': .*no text"),
        (WATCH.replace("{}", "7"), "watch 'a': it is no JSON object"),
        (WATCH.replace("{}", "[" * 100_000), "watch 'a'"),
        (WATCH.replace("{}", '{"question": " "}'), "watch 'a': the question is empty"),
        (WATCH.replace("{}", '{"question": "?", "min_interval_s": -1}'), "watch 'a': min_interval_s"),
        (WATCH.replace("{}", '{"question": "?", "params": {"max_tokens": 0}}'), "watch 'a': .*max_tokens"),
        (WATCH.replace("{}", '{"question": "?", "run": "rm"}'), "watch 'a': it has 'run'"),
    ],
)
async def test_a_database_that_is_damaged_or_means_harm_is_explained_and_stays(
    statement: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    await make_log(path)
    with database(path) as connection:
        connection.execute(statement).fetchall()
    content = path.read_bytes()
    for _ in range(2):
        with pytest.raises(SessionLogError, match=said):
            await opened(path).start()
    assert path.read_bytes() == content
    assert names_in(tmp_path) == ["log"]


async def test_pages_that_are_damaged_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await make_log(path, 200)
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        damaged = content.copy()
        damaged[start : start + 64] = os.urandom(64)
        path.write_bytes(damaged)
        with pytest.raises(SessionLogError, match=r"is damaged|is no log"):
            await opened(path).start()
        assert path.read_bytes() == damaged
    path.write_bytes(content[:8192])
    with pytest.raises(SessionLogError, match="is damaged"):
        await opened(path).start()


async def test_a_damaged_log_is_not_compacted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await make_log(path)
    with database(path) as connection:  # leaves free pages
        connection.executescript("CREATE TABLE t (v); INSERT INTO t VALUES (zeroblob(20000)); DROP TABLE t")
    damaged = bytearray(path.read_bytes())
    damaged[8192:8256] = bytes(64)
    path.write_bytes(damaged)
    with pytest.raises(SessionLogError, match="is damaged"):
        await opened(path).start()
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal", "-lock"])
async def test_a_link_that_is_planted_beside_a_log_is_not_followed(suffix: str, tmp_path: Path) -> None:
    path, mine = tmp_path / "log", tmp_path / "mine"
    await make_log(path)
    mine.write_text("mine")
    path.with_name("log" + suffix).symlink_to(mine)
    with pytest.raises(SessionLogError):
        await opened(path).start()
    assert mine.read_text() == "mine"


async def test_a_journal_that_is_planted_is_not_played_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await make_log(path)
    content = path.read_bytes()
    path.with_name("log-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(4096))
    with pytest.raises(SessionLogError, match="log-journal is not of a session's log"):
        await opened(path).start()
    assert path.read_bytes() == content


async def test_the_database_of_another_program_is_not_changed_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with database(path) as theirs:
        theirs.execute("PRAGMA journal_mode=WAL")
        theirs.execute("CREATE TABLE mine (value)")
        theirs.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(SessionLogError, match="another program's database"):
            await opened(path).start()
        theirs.execute("INSERT INTO mine VALUES (2)")
    with database(path) as again:
        assert again.execute("SELECT value FROM mine").fetchall() == [(1,), (2,)]


@pytest.mark.parametrize(
    "name", ["a?mode=memory", "a#b", "file:a?immutable=1", ":memory:", "%41", "a 'b' \";--", "ü€😀"]
)
async def test_a_name_is_a_name_and_no_address(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await make_log(Path(name))
    assert names_in(tmp_path) == [name]
    async with opened(Path(name)) as resumed:
        assert resumed.state.version == 3


def as_folder(path: Path) -> None:
    path.mkdir()


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_nothing_in_no_folder(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("made", [as_folder, as_pipe, as_nothing_in_no_folder])
async def test_a_log_that_is_no_file_is_refused(made: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    made(tmp_path / "folder" / "log")
    with pytest.raises(SessionLogError):
        await opened(tmp_path / "folder" / "log").start()


@pytest.mark.parametrize("log", [5, "a\0b", b"log\0"], ids=repr)
def test_a_log_argument_that_is_no_path_is_refused(log: Any) -> None:
    with pytest.raises(ConfigurationError, match="log="):
        Session(Engine(answer="x"), log=log)


async def test_a_log_has_one_session_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    linked = tmp_path / "link"
    linked.symlink_to(path)
    async with opened(path) as session:
        for number in range(1, 4):
            for other in (path, linked):
                with pytest.raises(SessionLogError, match="in another process"):
                    await opened(other).start()
            await session.append(line(number))
            await session.flush()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(path), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        assert b"in another process" in said
    async with opened(linked) as session:
        assert session.state.version == 3
        with pytest.raises(ConfigurationError, match="before"):
            await session.start()
        await session.append(line(4))
        assert await session.flush() == 4, "a second start takes nothing from the first"
    assert linked.is_symlink()


async def test_a_log_refuses_another_system_text_and_takes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with opened(path, system="Watch."):
        pass
    with pytest.raises(SessionLogError, match="another system text"):
        await opened(path, system="Sleep.").start()
    async with opened(path, system="Watch."):
        pass


async def test_a_system_text_that_was_frozen_is_there_again(tmp_path: Path) -> None:
    path, first = tmp_path / "log", "Watch."

    async def system(session: Session) -> str:
        async with session.ask(f"{session.version}?", at_least=session.state.num_appended) as stream:
            _ = [chunk async for chunk in stream]
        engine = session._data._backend
        assert isinstance(engine, Engine)
        return engine.asked[-1].split("User:")[0].strip()

    async with opened(path, system=first) as session:
        await session.append(line(1))
        assert await session.freeze("With a document.") == 2
        assert await session.append(line(3)) == 3
        assert await session.flush() == 3
    for number in (4, 5, 6):  # read as an entry, from the header, and given with the text that it was opened with
        async with opened(path, **({"system": first} if number == 6 else {})) as session:
            assert session.version == number - 1
            assert await system(session) == "With a document."
            assert await session.append(line(number)) == number
    with pytest.raises(SessionLogError, match="another system text"):
        await opened(path, system="Sleep.").start()
    async with opened(path, system="With a document.") as session:
        assert await session.freeze(first) == 7
    async with opened(path) as session:
        assert await system(session) == first
        with pytest.raises(SessionLogError, match="1,000,000"):
            await session.freeze("x" * 1_000_001)


async def test_a_forged_log_that_has_counted_farther_than_any_session_is_refused(tmp_path: Path) -> None:
    path, most = tmp_path / "log", 2**52 - 1
    await make_log(path)
    made = path.read_bytes()
    for name in ("num_appended", "num_dropped", "num_slid", "num_events"):
        for value in (most + 1, most):
            path.write_bytes(made)
            with database(path) as connection:
                connection.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))
            if value > most:
                with pytest.raises(SessionLogError, match=name):
                    await opened(path).start()
        async with opened(path) as session:
            assert await session.append("one") == session.state.num_appended
            await session.flush()


class FullDisk:
    """A disk that takes nothing while it is full, but for the beginning of what is written."""

    def __init__(self) -> None:
        self._most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, num_bytes: int = 0) -> None:
        """Let no file of this process have more bytes."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self._most[1]))

    def free(self) -> None:
        """Let files grow again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._most)


@pytest.fixture
def disk() -> Iterator[FullDisk]:
    """A disk that is not full at the end."""
    made = FullDisk()
    yield made
    made.free()


async def test_a_session_goes_on_though_the_disk_is_full(
    tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path, copy = tmp_path / "log", tmp_path / "copy" / "log"
    copy.parent.mkdir()
    async with opened(path) as session:
        await session.append(line(1))
        assert await session.flush() == 1
        wal = path.with_name("log-wal")
        disk.fill(wal.stat().st_size + 100)
        await session.append(line(2))
        for _ in range(3):
            with pytest.raises(SessionLogError, match="disk I/O error"):
                await session.flush()
        state = session.state.log
        assert state is not None
        assert (state.flushed, state.num_failures, state.error) == (1, 3, "disk I/O error")
        assert caplog.text.count("disk I/O error") == 1
        assert await window_of(session) == [line(1), line(2)]
        disk.free()
        for name in ("log", "log-wal"):
            shutil.copy(tmp_path / name, copy.parent)
        assert await session.flush() == 2
        assert session.state.log is not None
        assert session.state.log.error is None
        disk.fill()
        await session.append(line(3))
    disk.free()
    async with opened(path) as resumed:
        assert await window_of(resumed) == [line(1), line(2)]
    async with opened(copy) as resumed:
        assert await window_of(resumed) == [line(1)], "half a transaction counts for nothing"


async def test_a_log_that_takes_no_more_pages_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await make_log(path)
    async with opened(path) as session:
        assert session._log is not None
        connection = session._log._file._connection
        assert connection is not None
        (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={num_pages}")
        await session.append("x" * 20_000)
        with pytest.raises(SessionLogError, match="No space left on the disk"):
            await session.flush()
        connection.execute("PRAGMA max_page_count=10000")
        assert await session.flush() == 4


class SlowDisk:
    """A disk that does not answer until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, write = Event(), LogFile.write
        waiting = lambda file, changes: (self.goes_on.wait(20), write(file, changes))  # noqa: E731
        monkeypatch.setattr(LogFile, "write", waiting)


async def test_appending_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it cannot take is not queued without end."""
    disk = SlowDisk(monkeypatch)
    path = tmp_path / "log"
    async with opened(path) as session:
        for number in range(1, 10_001):
            await session.append(line(number))
        assert session._log is not None
        assert len(session._log._held) <= 4096 + 300
        flushing = asyncio.create_task(session.flush())
        before = await window_of(session)
        assert not flushing.done()
        disk.goes_on.set()
        assert await flushing == 10_000
        assert len(session._log._held) < 100
    async with opened(path) as resumed:
        assert await window_of(resumed) == before


async def test_a_removed_or_replaced_log_is_told_from_ours(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with opened(path) as session:
        await session.append(line(1))
        await session.flush()
        path.unlink()
        await session.append(line(2))
        with pytest.raises(SessionLogError, match="removed"):
            await session.flush()
        assert await session.flush() == 2, "it is written again"
        path.unlink()
        path.write_text("somebody's")
        await session.append(line(3))
        for _ in range(2):
            with pytest.raises(SessionLogError, match="replaced"):
                await session.flush()
    assert path.read_text() == "somebody's"


async def test_a_foreign_log_that_takes_the_place_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    async with opened(path) as session:
        await session.append(line(1))
        await session.flush()
        await make_log(other, 5)
        content = other.read_bytes()
        other.replace(path)
        await session.append(line(2))
        with pytest.raises(SessionLogError, match="replaced"):
            await session.flush()
    assert path.read_bytes() == content
    assert names_in(tmp_path) == ["log"], "nothing of ours is played back into it"
    async with opened(path) as resumed:
        assert resumed.state.version == 5


async def test_a_log_that_is_removed_is_gone_with_all_that_lay_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with opened(path) as session:
        await session.append(line(1))
        await session.flush()
        path.unlink()
    assert names_in(tmp_path) == []


async def test_a_database_that_another_program_locks_is_waited_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrag.sessions.log.file.BUSY_S", 0.01)
    path = tmp_path / "log"
    await make_log(path)
    with database(path) as theirs:
        async with opened(path) as session:
            theirs.execute("BEGIN IMMEDIATE")
            await session.append(line(4))
            with pytest.raises(SessionLogError, match="database is locked"):
                await session.flush()
            theirs.execute("ROLLBACK")
            assert await session.flush() == 4
        theirs.execute("PRAGMA locking_mode=EXCLUSIVE")
        theirs.execute("UPDATE meta SET value = 9 WHERE name = 'num_slid'")
        with pytest.raises(SessionLogError, match="cannot be read: database is locked"):
            await opened(path).start()


async def test_reading_the_header_of_a_killed_process_s_log_is_no_use_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    flushed = flushed_until_killed(path, 2)
    os.utime(path, (1000, 1000))
    assert read_header(path).num_appended >= flushed
    assert path.stat().st_mtime == 1000
    assert sorted(names_in(tmp_path)) == ["log", "log-lock"]


async def test_a_session_whose_lock_was_removed_takes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with opened(path) as session:
        await session.append(line(1))
        await session.flush()
        path.with_name("log-lock").unlink()
        await session.append(line(2))
        assert await session.flush() == 2
        with pytest.raises(SessionLogError, match="in another process"):
            await opened(path).start()
    assert names_in(tmp_path) == ["log"]


async def test_texts_of_all_kinds_are_kept(tmp_path: Path) -> None:
    texts = ["", "\n\r\u2028\0", "ü€😀", '"}\n{"dropped": 1}', "x" * 999_000, "\ud800"]
    async with opened(tmp_path / "log") as session:
        for number, text in enumerate(texts, 1):
            assert await session.append(Chunk(text, "a", "b", 7, 0.0)) == number
        with pytest.raises(SessionLogError, match="split it"):
            await session.append("x" * 1_000_001)
        await settled(session)
        before = session._data.ingestion.window.token_ids
    async with opened(tmp_path / "log") as resumed:
        assert resumed._data.ingestion.window.token_ids == before
        assert resumed.state.version == len(texts)


async def test_chunks_without_tokens_do_not_pile_up(tmp_path: Path) -> None:
    from streamrag import PromptTemplate

    async with opened(tmp_path / "log", template=PromptTemplate(passage="{text}")) as session:
        for _ in range(50):
            await session.append("")
        await settled(session)
        assert session._log is not None
        assert not session._log._held
    async with opened(tmp_path / "log") as resumed:
        assert resumed.state.version == 50


async def test_a_session_without_a_log_has_nothing_to_flush() -> None:
    async with Session(Engine(answer="yes")) as session:
        assert session.state.log is None
        with pytest.raises(ConfigurationError, match="log=PATH"):
            await session.flush()


async def test_a_start_that_fails_or_is_cancelled_lets_others_have_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for num_steps in range(12):
        session = opened(path)
        starts = asyncio.create_task(session.start())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        starts.cancel()
        await asyncio.wait([starts])
        if not starts.cancelled():
            await session.aclose()
        await until(lambda: len(asyncio.all_tasks()) == 1)
        async with opened(path):
            pass


@pytest.mark.parametrize("forgets", [False, True])
async def test_closing_waits_no_longer_for_a_disk_than_for_anything_else_and_ends_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forgets: bool
) -> None:
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr("streamrag.sessions.log.session_log.LET_GO_S", 0.05)
    session = opened(tmp_path / "log")
    await session.start()
    await session.append(line(1))
    await session.aclose(forgets=forgets)
    assert "left as it is" in caplog.text
    disk.goes_on.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert names_in(tmp_path) == ([] if forgets else ["log"])
    async with opened(tmp_path / "log") as session:
        assert session.state.num_appended == (0 if forgets else 1)


async def test_a_session_may_forget(tmp_path: Path) -> None:
    session = opened(tmp_path / "log")
    await session.start()
    await session.append(line(1))
    await session.aclose(forgets=True)
    assert names_in(tmp_path) == []


async def test_a_header_is_read_also_while_a_session_has_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = SessionLog(path, owner="ada")
    async with opened(path, system="s"):
        pass
    async with Session(Engine(answer="yes"), log=SessionLog(tmp_path / "hers", owner="ada")) as session:
        await session.append("one")
        await session.flush()
        for _ in range(2):
            header = read_header(tmp_path / "hers")
            assert (header.owner, header.num_appended) == ("ada", 1)
        await session.append("two")
        assert await session.flush() == 2
    assert read_header(tmp_path / "hers").num_appended == 2
    assert log.path == path
    with pytest.raises(SessionLogError, match="cannot be read"):
        read_header(tmp_path / "none")
    assert sorted(names_in(tmp_path)) == ["hers", "log"]


async def test_watches_with_a_name_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    params = SamplingParams(max_tokens=7, stop=("END",), extra={"min_tokens": 2})
    async with opened(path) as session:
        session.watch(
            "Any over 90?", name="alarm", answers=("yes", "no"), min_interval_s=2.5, priority=3, with_margin=True
        )
        session.watch("What is new?", name="news", params=params, decisive_margin=4.0)
        session.watch("Nameless?")
        await session.watch("Ended?", name="ended").aclose()
        for i in range(2):
            session.watch(f"Version {i}?", name="replaced")
        await settled(session)
    for _ in range(2):
        async with opened(path) as resumed:
            watches = resumed.watches
            assert sorted(watches) == ["alarm", "news", "replaced"]
            alarm, news = watches["alarm"], watches["news"]
            assert (alarm.question, alarm.spec.answers, alarm.options.min_interval_s) == (
                "Any over 90?",
                ("yes", "no"),
                2.5,
            )
            assert (alarm.options.priority, alarm.spec.with_margin, alarm.spec.params.max_tokens) == (3, True, 1)
            assert (news.spec.params, news.spec.decisive_margin) == (params, 4.0)
            assert watches["replaced"].question == "Version 1?"
            assert (await news.at_least(0)).text == "yes"
    async with opened(path) as resumed:
        await resumed.watches["alarm"].aclose()
    async with opened(path) as resumed:
        assert sorted(resumed.watches) == ["news", "replaced"]


async def test_a_watch_that_cannot_be_stored_in_the_log_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "log") as session:
        for extra in ({"processor": object()}, {"bias": float("nan")}):
            params = SamplingParams(extra=extra)
            with pytest.raises(ConfigurationError, match="alarm"):
                session.watch("Any?", name="alarm", params=params)
        with pytest.raises(SessionLogError, match="shorten it"):
            session.watch("?" * 1_000_001, name="alarm")
        assert session.watches == {}
        session.watch("Any?", params=params)


async def test_watches_that_come_and_go_leave_a_log_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.log.file.MAX_WAL_BYTES", 30_000)
    path = tmp_path / "log"
    async with opened(path) as session:
        session.watch("Kept?", name="kept")
        for i in range(300):
            await session.watch(f"Number {i}?", name=f"watch {i}").aclose()
            await session.append(line(i))
            await session.flush()
            assert bytes_in(tmp_path) < 90_000
    async with opened(path) as resumed:
        assert sorted(resumed.watches) == ["kept"]


async def test_event_numbers_are_never_used_again_after_a_restart(tmp_path: Path) -> None:
    path, told = tmp_path / "log", 0
    for is_killed in (True, False, True, True, False):
        log = SessionLog(path)
        logged = await log.open()
        log.start("s", 300, 0.5, logged)
        await log.wait_for_attempt()
        assert log.num_events >= told
        for _ in range(1500):
            number = log.next_event()
            assert number > told
            told = number
            if number % 100 == 0:  # as time passes
                log.append(Numbered(log._header.num_appended + 1, Chunk("x", "")))
                await log.flush()
        if is_killed:
            assert log._task is not None
            await cancel_and_wait([log._task])
            log._file.close()
        else:
            await log.aclose()
            file = LogFile(path)
            logged = file.open()
            file.close()
            assert logged is not None
            assert logged.header.num_events == told
    assert told < 30_000
