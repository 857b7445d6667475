"""Sessions whose text is on disk: closed, killed, torn, damaged, on a full disk."""

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamrag import Chunk, ConfigurationError, Pipeline, SamplingParams, SessionLogError
from streamrag.sessions import Session
from streamrag.sessions.buffer import Numbered
from streamrag.sessions.log import SessionLog
from streamrag.sessions.log_file import LogFile, read_header
from streamrag.support.tasks import cancel_regardless
from streamrag.testing import ScriptedSource
from tests.sessions.test_faults import until
from tests.sessions.test_session import Engine, lines_of, settled

WINDOW = 300


def line(number: int) -> str:
    return f"{number}:" + "x" * (number * 7 % 40)


async def window_of(session: Session) -> list[str]:
    """The data that questions are asked about, at the newest version."""
    engine = session._backend
    assert isinstance(engine, Engine)
    await settled(session)
    return lines_of(engine.asked[-1])


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def opened(path: Path, **options: Any) -> Session:
    return Session(Engine(answer="yes"), log=path, window_tokens=WINDOW, **options)


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


async def test_what_was_dropped_stays_dropped(tmp_path: Path) -> None:
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
    monkeypatch.setattr("streamrag.sessions.log_file.SLACK_BYTES", 2000)
    path = tmp_path / "log"
    sizes = []
    async with opened(path) as session:
        for number in range(1, 1500):
            await session.append(line(number))
            if number % 10 == 0:
                await settled(session)
                assert await session.flush() == number
                sizes.append(path.stat().st_size)
        held = await window_of(session)
        assert max(sizes[40:]) < 9000
    async with opened(path) as resumed:
        assert await window_of(resumed) == held
        assert resumed.state.version == 1499


KILLED = """
import asyncio, sys
from streamrag.sessions import Session, log_file
from streamrag.testing import ScriptedBackend

log_file.SLACK_BYTES = 500  # written anew all the time

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


async def test_what_was_flushed_is_there_after_a_kill(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("num_bytes", [1, 2, 20])
async def test_a_line_that_was_not_finished_is_left_out_and_said(
    num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    async with opened(path) as session:
        for number in range(1, 4):
            await session.append(line(number))
            await session.flush()
    path.write_bytes(path.read_bytes()[:-num_bytes])
    async with opened(path) as resumed:
        assert await window_of(resumed) == [line(1), line(2)]
        assert await resumed.append(line(3)) == 3
        assert resumed.state.log is not None
        assert resumed.state.log.is_torn
    assert "not finished" in caplog.text
    async with opened(path) as again:
        assert await window_of(again) == [line(1), line(2), line(3)]
        assert again.state.log is not None
        assert not again.state.log.is_torn


HEADER = {"format": "streamrag-session", "version": 1, "system": "s", "window_tokens": 300, "slide_share": 0.5}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"my diary\n", "is no log of a session"),
        (b"root:x:0:0", "is no log of a session"),
        (b"\x00" * 4096, "is no log of a session"),
        (b"[" * 100_000 + b"\n", "is no log of a session"),
        (b'{"format": "streamrag-session"}\n', "system: field required"),
        ({**HEADER, "version": 2}, "newer streamrag"),
        ({**HEADER, "window_tokens": -1}, "window_tokens"),
        ({**HEADER, "slide_share": 1}, "slide_share"),
        ({**HEADER, "num_appended": 10**30}, "is no log"),
        ({**HEADER, "__class__": "x"}, "not known"),
        (
            [HEADER, {"number": 2, "text": "a"}, {"number": 2, "text": "b"}],
            "line 3, .*: version 2 stands behind",
        ),
        ([HEADER, {"number": 0, "text": "a"}], "line 2, is damaged: number"),
        ([HEADER, {"number": 1, "text": 5}, {"number": 2, "text": "a"}], "line 2, is damaged: text"),
        ([HEADER, {"number": 1, "text": "a", "run": "rm"}], "line 2, is damaged: it has 'run'"),
        ([HEADER, {"number": 1, "text": "a", "passage": -1}], "line 2, is damaged: passage"),
        ([HEADER, {"dropped": "all"}], "line 2, is damaged: dropped"),
        ([HEADER, 7], "line 2, is damaged: it is no JSON object"),
        ([HEADER, {"watch": "a", "question": " "}], "line 2, is damaged: the question is empty"),
        ([HEADER, {"watch": "a", "question": "?", "every_s": -1}], "line 2, is damaged: every_s"),
        ([HEADER, {"watch": "a", "question": "?", "params": {"max_tokens": 0}}], "line 2, is damaged: .*max_tokens"),
        ([HEADER, {"watch": "a", "question": "?", "run": "rm"}], "line 2, is damaged: it has 'run'"),
        ([HEADER, {"num_events": -1}], "line 2, is damaged: num_events"),
        ([HEADER, {"frozen": 0, "system": "x"}], "line 2, is damaged: frozen"),
        ([HEADER, {"frozen": 1}], "line 2, is damaged: system"),
        (
            [HEADER, {"number": 2, "text": "a"}, {"frozen": 2, "system": "x"}],
            "line 3, .*: version 2 stands behind",
        ),
        (json.dumps(HEADER).encode() + b'\n{"number": 1, "te\n{"number": 2, "text": "x"}\n', "line 2, is damaged"),
        (json.dumps(HEADER).encode() + b"\n" + b"x" * 17_000_000, "line of more than"),
    ],
)
async def test_a_file_that_is_damaged_or_means_harm_is_explained_and_stays(
    content: Any, said: str, tmp_path: Path
) -> None:
    if not isinstance(content, bytes):
        lines = content if isinstance(content, list) else [content]
        content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    path = tmp_path / "log"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(SessionLogError, match=said):
            await opened(path).start()
    assert path.read_bytes() == content
    assert names_in(tmp_path) == ["log"]


def as_folder(path: Path) -> None:
    path.mkdir()


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_nothing_in_no_folder(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("made", [as_folder, as_pipe, as_nothing_in_no_folder])
async def test_what_is_no_file_is_refused(made: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    made(tmp_path / "folder" / "log")
    with pytest.raises(SessionLogError):
        await opened(tmp_path / "folder" / "log").start()


@pytest.mark.parametrize("log", [5, "a\0b", b"log\0"], ids=repr)
def test_what_is_no_path_is_refused(log: Any) -> None:
    with pytest.raises(ConfigurationError, match="log="):
        Session(Engine(answer="x"), log=log)


async def test_one_log_has_one_session(tmp_path: Path) -> None:
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


async def test_another_system_text_is_refused_and_the_same_is_not(tmp_path: Path) -> None:
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
        engine = session._backend
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
    for counted in ("num_appended", "num_dropped", "num_slid", "num_events"):
        path.write_text(json.dumps({**HEADER, counted: most + 1}) + "\n")
        with pytest.raises(SessionLogError, match=counted):
            await opened(path).start()
        path.write_text(json.dumps({**HEADER, counted: most}) + "\n")
        async with opened(path) as session:
            assert await session.append("one") == session.state.num_appended
            await session.flush()


class FullDisk:
    """A disk that takes nothing while it is full; half of what is written is there all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write = os.write
        monkeypatch.setattr("streamrag.sessions.log_file.os.write", self.write)

    def write(self, file: int, content: memoryview) -> int:
        if not self.is_full:
            return self._write(file, content)
        self._write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_session_goes_on_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    path = tmp_path / "log"
    async with opened(path) as session:
        await session.append(line(1))
        assert await session.flush() == 1
        disk.is_full = True
        await session.append(line(2))
        for _ in range(3):
            with pytest.raises(SessionLogError, match="No space left"):
                await session.flush()
        state = session.state.log
        assert state is not None
        assert (state.flushed, state.num_failures, state.error) == (1, 3, "No space left on device")
        assert caplog.text.count("No space left") == 1
        assert await window_of(session) == [line(1), line(2)]
        lines = path.read_bytes().splitlines(keepends=True)
        assert all(json.loads(each) for each in lines), "half a line is taken back"
        disk.is_full = False
        assert await session.flush() == 2
        assert session.state.log is not None
        assert session.state.log.error is None
        disk.is_full = True
        await session.append(line(3))
    disk.is_full = False
    async with opened(path) as resumed:
        assert await window_of(resumed) == [line(1), line(2)]


async def test_appending_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it cannot take is not queued without end."""
    from threading import Event

    goes_on, fsync = Event(), os.fsync
    monkeypatch.setattr("streamrag.sessions.log_file.os.fsync", lambda file: (goes_on.wait(20), fsync(file)))
    path = tmp_path / "log"
    async with opened(path) as session:
        for number in range(1, 10_001):
            await session.append(line(number))
        assert session._log is not None
        assert len(session._log._queued) <= 4096
        flushing = asyncio.create_task(session.flush())
        before = await window_of(session)
        assert not flushing.done()
        goes_on.set()
        assert await flushing == 10_000
        assert len(session._log._held) < 100
    async with opened(path) as resumed:
        assert await window_of(resumed) == before


async def test_a_log_that_somebody_removes_or_replaces_is_told_from_ours(tmp_path: Path) -> None:
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


async def test_texts_of_all_kinds_are_kept(tmp_path: Path) -> None:
    texts = ["", "\n\r\u2028\0", "ü€😀", '"}\n{"dropped": 1}', "x" * 999_000, "\ud800"]
    async with opened(tmp_path / "log") as session:
        for number, text in enumerate(texts, 1):
            assert await session.append(Chunk(text, "a", "b", 7, 0.0)) == number
        with pytest.raises(SessionLogError, match="split it"):
            await session.append("x" * 1_000_001)
        await settled(session)
        before = session._ingestion.window.token_ids  # type: ignore[union-attr]
    async with opened(tmp_path / "log") as resumed:
        assert resumed._ingestion.window.token_ids == before  # type: ignore[union-attr]
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
    from threading import Event

    goes_on, fsync = Event(), os.fsync
    monkeypatch.setattr("streamrag.sessions.log.LET_GO_S", 0.05)
    monkeypatch.setattr("streamrag.sessions.log_file.os.fsync", lambda file: (goes_on.wait(20), fsync(file)))
    session = opened(tmp_path / "log")
    await session.start()
    await session.append(line(1))
    await session.aclose(forgets=forgets)
    assert "left as it is" in caplog.text
    goes_on.set()
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


def test_a_header_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps({**HEADER, "owner": "ada"}) + "\nrubbish\n")
    assert read_header(path).owner == "ada"
    with pytest.raises(SessionLogError, match="cannot be read"):
        read_header(tmp_path / "none")
    with pytest.raises(SessionLogError):
        LogFile(path).open()


async def test_watches_with_a_name_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    params = SamplingParams(max_tokens=7, stop=("END",), extra={"min_tokens": 2})
    async with opened(path) as session:
        session.watch("Any over 90?", name="alarm", answers=("yes", "no"), every_s=2.5, priority=3, with_gap=True)
        session.watch("What is new?", name="news", params=params, decisive_gap=4.0)
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
            assert (alarm.question, alarm.asked.answers, alarm.every_s) == ("Any over 90?", ("yes", "no"), 2.5)
            assert (alarm.priority, alarm.asked.with_gap, alarm.asked.params.max_tokens) == (3, True, 1)
            assert (news.asked.params, news.asked.decisive_gap) == (params, 4.0)
            assert watches["replaced"].question == "Version 1?"
            assert (await news.at_least(0)).text == "yes"
    async with opened(path) as resumed:
        await resumed.watches["alarm"].aclose()
    async with opened(path) as resumed:
        assert sorted(resumed.watches) == ["news", "replaced"]


async def test_what_cannot_be_kept_of_a_watch_is_refused(tmp_path: Path) -> None:
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
    monkeypatch.setattr("streamrag.sessions.log_file.SLACK_BYTES", 2000)
    path = tmp_path / "log"
    async with opened(path) as session:
        session.watch("Kept?", name="kept")
        for i in range(300):
            await session.watch(f"Number {i}?", name=f"watch {i}").aclose()
            await session.append(line(i))
            await session.flush()
            assert path.stat().st_size < 20_000
    async with opened(path) as resumed:
        assert sorted(resumed.watches) == ["kept"]


async def test_no_event_has_a_number_of_before(tmp_path: Path) -> None:
    path, told = tmp_path / "log", 0
    for is_killed in (True, False, True, True, False):
        log = SessionLog(path)
        logged = await log.open()
        log.start("s", 300, 0.5, logged)
        await log.begun()
        assert log.num_events >= told
        for _ in range(1500):
            number = log.next_event()
            assert number > told
            told = number
            if number % 100 == 0:  # as time passes
                log.append(Numbered(log._newest + 1, Chunk("x", "")))
                await log.flush()
        if is_killed:
            assert log._task is not None
            await cancel_regardless([log._task])
            log._file.close()
        else:
            await log.aclose()
            file = LogFile(path)
            logged = file.open()
            file.close()
            assert logged is not None
            assert logged.num_events == told
    assert told < 30_000
