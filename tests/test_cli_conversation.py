"""`streamrag ask` without a question."""

import asyncio
import io
import os
import pty
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from streamrag import Append, Chunk, EngineDeadError, Pipeline
from streamrag.cli import _Stop, main
from streamrag.cli.conversation import (
    MAX_LINE_BYTES,
    ChatHistory,
    converse,
    questions,
    stopped_by_ctrl_c,
)
from streamrag.cli.output import Output
from streamrag.core import Prompt, SamplingParams, Turn
from streamrag.errors import PromptTooLongError
from streamrag.telemetry import Answer
from streamrag.testing import ScriptedBackend, ScriptedSource

pytestmark = pytest.mark.usefixtures("default_signals")


class Talk:
    """A conversation over a pipe, with what a person sees."""

    def __init__(self, pipeline: Pipeline, max_characters: int = 1000) -> None:
        self.progress, self.output = Output(stderr=True), Output()
        self.progress.file = self.output.file = io.StringIO()
        self.answers: list[Answer] = []
        self.conversation = ChatHistory(self._ask, max_characters)
        self._pipeline = pipeline

    async def _ask(self, question: str, history: tuple[Turn, ...]) -> Answer:
        async with self._pipeline.stream(question, history=history) as chunks:
            async for chunk in chunks:
                self.output.print(chunk.text, end="")
        self.answers.append(chunks.result)
        return chunks.result

    async def over_a_pipe(self, written: bytes) -> int:
        read, write = os.pipe()
        try:
            writing = asyncio.ensure_future(asyncio.to_thread(_write, write, written))
            num_failed = await converse(self.conversation, self.progress, self.output, file=read)
            await writing
            return num_failed
        finally:
            os.close(read)

    @property
    def seen(self) -> str:
        assert isinstance(self.output.file, io.StringIO)
        return self.output.file.getvalue()


def _write(file: int, written: bytes) -> None:
    with os.fdopen(file, "wb") as pipe:
        pipe.write(written)


def texts(prompts: list[list[Prompt]]) -> list[str]:
    return ["".join(map(chr, each[-1].token_ids)) for each in prompts]


async def test_each_line_is_a_question_and_what_was_said_stands_before_its_documents() -> None:
    source, backend = ScriptedSource([Append(Chunk("alpha", "a.md"))]), ScriptedBackend("So it is.")
    async with Pipeline(source, backend) as pipeline:
        talk = Talk(pipeline)
        assert await talk.over_a_pipe("\ufeffWarum?\n\n  And then?  \r\nWhy not?".encode()) == 0
    assert source.queries == ["Warum?", "And then?", "Why not?"]
    first, second, third = texts(backend.prompts)
    assert "Warum?" in first
    assert second.index("Warum?") < second.index("So it is.") < second.index("alpha") < second.index("And then?")
    # All but the last turn is at the place where it was, and so is its KV.
    assert third.startswith(second[: second.index("So it is.") + len("So it is.")])
    assert talk.seen == "So it is." * 3


async def test_a_question_that_fails_does_not_end_it_and_is_not_remembered() -> None:
    def steps(question: str) -> list[Append | Exception]:
        return [RuntimeError("it broke")] if question == "Broken?" else [Append(Chunk("alpha", "a.md"))]

    backend = ScriptedBackend("Yes.")
    async with Pipeline(ScriptedSource(steps), backend) as pipeline:
        talk = Talk(pipeline)
        assert await talk.over_a_pipe(b"Broken?\nStill there?\n" + b"x" * (MAX_LINE_BYTES + 9) + b"\nAnd now?\n") == 2
    assert "SourceError: ScriptedSource failed: RuntimeError: it broke" in talk.seen
    assert "ConfigurationError: the query has" in talk.seen
    assert [turn.text for turn in talk.conversation.turns] == ["Still there?", "Yes.", "And now?", "Yes."]


async def test_an_engine_that_is_gone_ends_it() -> None:
    backend = ScriptedBackend("Yes.", error=EngineDeadError("it is gone"))
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        talk = Talk(pipeline)
        with pytest.raises(EngineDeadError):
            await talk.over_a_pipe(b"One?\nTwo?\n")
    assert backend.num_requests == 0


async def test_the_oldest_turns_are_forgotten_when_they_do_not_fit() -> None:
    backend = ScriptedBackend("Yes.")
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        talk = Talk(pipeline, max_characters=60)
        await talk.over_a_pipe(b"".join(b"This is question %d?\n" % n for n in range(20)))
        assert talk.conversation.turns[-2:] == (Turn("user", "This is question 19?"), Turn("assistant", "Yes."))
        assert sum(len(turn.text) for turn in talk.conversation.turns) <= 60


async def test_a_model_too_short_for_what_was_said_forgets_it_and_answers() -> None:
    backend = ScriptedBackend("Yes.", max_model_len=700)
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        talk = Talk(pipeline, max_characters=10_000)
        assert await talk.over_a_pipe(b"".join(b"%d" % n * 90 + b"?\n" for n in range(6))) == 0
        with pytest.raises(PromptTooLongError):
            await talk.conversation.ask("x" * 800)


async def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on() -> None:
    class Endless(ScriptedBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[object]:  # type: ignore[override]
            async with aclosing(super().generate(prompts, params)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
                    if len(self.prompts) == 1 and getattr(event, "text", "") == "H":
                        os.kill(os.getpid(), signal.SIGINT)

    backend = Endless("Half", is_endless=True)
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        talk = Talk(pipeline)
        talking = asyncio.ensure_future(talk.over_a_pipe(b"One?\nTwo?\n"))
        while len(backend.prompts) < 2:
            await asyncio.wait([talking], timeout=0.01)
            assert not talking.done()
        assert "stopped" in talk.seen
        talking.cancel()  # as at the end of the program
        with pytest.raises(asyncio.CancelledError):
            await talking
        assert backend.num_requests == 0
        assert talk.conversation.turns == ()


async def test_ctrl_c_at_the_prompt_says_how_to_leave_and_the_next_one_ends_the_program() -> None:
    """The answer that it was to stop may have ended just before."""
    ends: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: ends.append(number))
    typed, terminal = pty.openpty()
    try:
        async with Pipeline(ScriptedSource([]), ScriptedBackend("So it is.")) as pipeline:
            talk = Talk(pipeline)
            talking = asyncio.ensure_future(converse(talk.conversation, talk.progress, talk.output, file=terminal))
            for seen in ("> ", "another Ctrl-C\n> "):
                while not talk.seen.endswith(seen):
                    await asyncio.wait([talking], timeout=0.01)
                    assert not talking.done()
                assert ends == []
                os.kill(os.getpid(), signal.SIGINT)
            assert ends == [signal.SIGINT]
            os.write(typed, b"Why?\n\x04")
            assert await talking == 0
            assert [answer.text for answer in talk.answers] == ["So it is."]
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(typed)
        os.close(terminal)


async def test_another_signal_or_a_second_ctrl_c_ends_the_program_and_not_only_the_answer() -> None:
    ends: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: ends.append(number))
    try:
        task = asyncio.ensure_future(asyncio.Event().wait())
        with stopped_by_ctrl_c(task):
            stop = _Stop()
            with stop.on_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                assert (ends, stop.number) == ([signal.SIGINT], signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert len(ends) == 1
            os.kill(os.getpid(), signal.SIGINT)
            assert len(ends) == 2
        with pytest.raises(asyncio.CancelledError):
            await task
        os.kill(os.getpid(), signal.SIGINT)
        assert len(ends) == 3
    finally:
        signal.signal(signal.SIGINT, before)


async def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task = asyncio.ensure_future(asyncio.sleep(0))
        with stopped_by_ctrl_c(task):
            os.kill(os.getpid(), signal.SIGINT)
            await task
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["pipe", "terminal", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[bytes], int]:
    def make(content: bytes) -> int:
        if request.param == "file":
            (tmp_path / "questions.txt").write_bytes(content)
            file = os.open(tmp_path / "questions.txt", os.O_RDONLY)
        else:
            file, write = os.pipe() if request.param == "pipe" else pty.openpty()[::-1]
            os.write(write, content + (b"" if request.param == "pipe" else b"\x04"))  # Ctrl-D
            if request.param == "pipe":
                os.close(write)
            else:
                request.addfinalizer(lambda: os.close(write))
        request.addfinalizer(lambda: os.close(file))
        return file

    return make


async def test_lines_come_from_a_pipe_a_terminal_and_a_file(opened: Callable[[bytes], int]) -> None:
    num_prompts = 0

    def count() -> None:
        nonlocal num_prompts
        num_prompts += 1

    file = opened("Première?\n\n \nZwei \xff?\n".encode())
    assert [line async for line in questions(file, count)] == ["Première?", "Zwei \xff?"]
    assert num_prompts >= 1


async def test_a_reader_that_waits_can_be_cancelled() -> None:
    read, write = os.pipe()
    is_waiting = asyncio.Event()
    reading = asyncio.ensure_future(anext(aiter(questions(read, is_waiting.set))))
    await is_waiting.wait()
    await asyncio.wait([reading], timeout=0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not asyncio.get_running_loop().remove_reader(read)
    os.close(read)
    os.close(write)


def test_options_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--url", "http://example.org", "--model", "/tmp", "--deadline", "0"]) == 1
    assert "deadline_s=0.0 must be greater than 0" in capsys.readouterr().err


def test_a_closed_standard_input_is_no_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["ask", "--url", "http://example.org", "--model", "/tmp"]) == 1
    assert "the standard input is closed; give a QUESTION" in capsys.readouterr().err
