import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt
from streamrag.errors import BackendError

BLOCK = 4


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Prompts:
    """Prompts as a test sends them. A prompt is written as text, one token a character."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Prompt | Exception | None] = asyncio.Queue()
        self.last = ""
        self.is_closed = False

    def send(self, text: str, *, is_complete: bool = False) -> None:
        num_shared = next((i for i, (a, b) in enumerate(zip(self.last, text, strict=False)) if a != b), None)
        if num_shared is None:
            num_shared = min(len(self.last), len(text))
        self.last = text
        self.queue.put_nowait(Prompt(ids(text), num_shared, is_complete))

    async def __call__(self) -> AsyncGenerator[Prompt, None]:
        try:
            while prompt := await self.queue.get():
                if isinstance(prompt, Exception):
                    raise prompt
                yield prompt
        finally:
            self.is_closed = True


class Engine:
    """What the requests that reach an engine do is decided by the test."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_open = 0
        self._changed = asyncio.Event()
        self._endings: dict[str, asyncio.Future[None]] = {}
        self.chunks: asyncio.Queue[AnswerChunk | Exception | None] = asyncio.Queue()
        self.may_abort = asyncio.Event()
        self.may_abort.set()

    def note(self, line: str) -> None:
        self.log.append(line)
        self._changed.set()

    async def until(self, line: str) -> None:
        while line not in self.log:
            self._changed.clear()
            await self._changed.wait()

    async def settle(self) -> None:
        """Let everything run that can run."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def prefill(self, token_ids: tuple[int, ...]) -> None:
        text = "".join(map(chr, token_ids))
        self._endings[text] = asyncio.get_running_loop().create_future()
        self.num_open += 1
        self.note(f"prefill {text}")
        try:
            await self._endings[text]
        except asyncio.CancelledError:
            while not self.may_abort.is_set():  # as an engine that must hear of the abort, cancelled again or not
                with suppress(asyncio.CancelledError):
                    await self.may_abort.wait()
            self.note(f"abort {text}")
            raise
        finally:
            self.num_open -= 1

    def finish(self, text: str, error: Exception | None = None) -> None:
        ending = self._endings[text]
        ending.set_exception(error) if error else ending.set_result(None)

    async def generate(self, token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
        self.num_open += 1
        self.note(f"generate {''.join(map(chr, token_ids))}")
        try:
            while chunk := await self.chunks.get():
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.num_open -= 1
            self.note("generate ended")

    def answer(self, *texts: str) -> None:
        for text in texts:
            self.chunks.put_nowait(AnswerChunk(text, ids(text)))
        self.chunks.put_nowait(None)


class Query:
    def __init__(self, block_size: int = BLOCK) -> None:
        self.prompts = Prompts()
        self.engine = Engine()
        self.events: AsyncGenerator[BackendEvent, None] = warm_then_generate(
            self.prompts(), prefill=self.engine.prefill, generate=self.engine.generate, block_size=block_size
        )

    async def next(self) -> BackendEvent:
        return await anext(self.events)

    @asynccontextmanager
    async def consumed(self) -> AsyncIterator["asyncio.Task[list[BackendEvent]]"]:
        """A task that takes every event."""
        task = asyncio.create_task(self._collect())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _collect(self) -> list[BackendEvent]:
        async with aclosing(self.events) as events:
            return [event async for event in events]

    def assert_nothing_is_left(self) -> None:
        assert self.engine.num_open == 0
        assert self.prompts.is_closed
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "warming"]


async def test_partial_prompts_are_prefilled_and_the_complete_one_is_answered() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.engine.finish("aaaa")
        await query.engine.settle()
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        query.engine.finish("aaaabbbb")
        await query.engine.settle()
        query.prompts.send("aaaabbbb?", is_complete=True)
        query.engine.answer("4", "2")
        assert await events == [Prefilled(4), Prefilled(8), AnswerChunk("4", ids("4")), AnswerChunk("2", ids("2"))]
    assert query.engine.log == ["prefill aaaa", "prefill aaaabbbb", "generate aaaabbbb?", "generate ended"]
    query.assert_nothing_is_left()


async def test_a_complete_prompt_alone_is_answered_without_warming() -> None:
    query = Query()
    query.prompts.send("aaaabbbb?", is_complete=True)
    query.engine.answer("4")
    async with query.consumed() as events:
        assert await events == [AnswerChunk("4", ids("4"))]
    assert query.engine.log == ["generate aaaabbbb?", "generate ended"]


async def test_a_superseded_request_is_aborted_at_once_and_not_reported() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        assert query.engine.log == ["prefill aaaa", "abort aaaa", "prefill aaaabbbb"]
        query.prompts.send("")
        await query.engine.until("abort aaaabbbb")
        query.prompts.send("?", is_complete=True)
        query.engine.answer("4")
        assert await events == [AnswerChunk("4", ids("4"))]


async def test_a_superseded_request_is_aborted_though_no_event_is_read() -> None:
    query = Query()
    query.prompts.send("aaaa")
    first = asyncio.create_task(query.next())
    await query.engine.until("prefill aaaa")
    query.engine.finish("aaaa")
    assert await first == Prefilled(4)
    query.prompts.send("xxxx")
    await query.engine.until("prefill xxxx")
    query.prompts.send("yyyy")
    await query.engine.until("prefill yyyy")
    assert "abort xxxx" in query.engine.log
    query.prompts.send("yyyy?", is_complete=True)
    await query.engine.until("generate yyyy?")
    assert "abort yyyy" in query.engine.log
    await query.events.aclose()
    query.assert_nothing_is_left()


async def test_the_complete_prompt_does_not_wait_for_the_request_under_way() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        query.prompts.send("aaaa?", is_complete=True)
        query.engine.answer("4")
        assert await events == [AnswerChunk("4", ids("4"))]
    assert query.engine.log == ["prefill aaaabbbb", "abort aaaabbbb", "generate aaaa?", "generate ended"]


async def test_only_the_last_of_prompts_that_come_together_is_sent() -> None:
    query = Query()
    for text in ("aaaa", "aaaabbbb", "cccc", "ccccdddd"):
        query.prompts.send(text)
    async with query.consumed():
        await query.engine.until("prefill ccccdddd")
        await query.engine.settle()
    assert query.engine.log == ["prefill ccccdddd", "abort ccccdddd"]


async def test_only_whole_blocks_are_sent_and_only_when_there_is_a_new_one() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaa")
        await query.engine.settle()
        assert query.engine.log == []
        query.prompts.send("aaaabb")
        await query.engine.until("prefill aaaa")
        query.engine.finish("aaaa")
        await query.engine.settle()
        query.prompts.send("aaaabbb")
        await query.engine.settle()
        assert query.engine.log == ["prefill aaaa"]
        query.prompts.send("aaaabbbbc")
        await query.engine.until("prefill aaaabbbb")
        query.prompts.send("aaaabbbbc?", is_complete=True)
        query.engine.answer()
        assert await events == [Prefilled(4)]


async def test_a_newer_prompt_that_needs_just_the_blocks_under_way_leaves_them_alone() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaab")
        await query.engine.until("prefill aaaa")
        query.prompts.send("aaaabb")
        query.prompts.send("aaaac")
        query.prompts.send("aaaac")
        await query.engine.settle()
        assert query.engine.log == ["prefill aaaa"]
        query.engine.finish("aaaa")
        await query.engine.settle()
        query.prompts.send("aaaac", is_complete=True)
        query.engine.answer()
        assert await events == [Prefilled(4)]


async def test_a_prompt_of_the_same_length_with_other_tokens_replaces_the_request_under_way() -> None:
    query = Query()
    async with query.consumed():
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.prompts.send("aaab")
        await query.engine.until("prefill aaab")
        assert query.engine.log == ["prefill aaaa", "abort aaaa", "prefill aaab"]


async def test_a_prompt_that_shrinks_to_what_is_computed_is_not_sent_again() -> None:
    query = Query()
    async with query.consumed():
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        query.engine.finish("aaaabbbb")
        await query.engine.settle()
        query.prompts.send("aaaa")
        await query.engine.settle()
        assert query.engine.log == ["prefill aaaabbbb"]
        query.prompts.send("aaaacccc")
        await query.engine.until("prefill aaaacccc")


async def test_a_prompt_that_shrinks_to_nothing_aborts_the_request_under_way() -> None:
    query = Query()
    async with query.consumed():
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        query.prompts.send("")
        await query.engine.until("abort aaaabbbb")
        query.prompts.send("aaaabbbb")  # not known to be computed: the request was aborted
        await query.engine.settle()
        assert query.engine.log.count("prefill aaaabbbb") == 2


async def test_a_prompt_changed_before_its_computed_end_is_computed_again() -> None:
    query = Query()
    async with query.consumed():
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
        query.engine.finish("aaaabbbb")
        await query.engine.settle()
        query.prompts.send("aaaaXbbb")
        await query.engine.until("prefill aaaaXbbb")
        query.engine.finish("aaaaXbbb")
        await query.engine.settle()
        query.prompts.send("aaaabbbb")  # the engine may still have it, but nobody can be sure
        await query.engine.settle()
        assert query.engine.log.count("prefill aaaabbbb") == 2


async def test_only_the_newest_of_unread_reports_is_kept() -> None:
    query = Query()
    query.prompts.send("aaaa")
    first = asyncio.create_task(query.next())
    await query.engine.until("prefill aaaa")
    query.engine.finish("aaaa")
    assert await first == Prefilled(4)
    for text in ("aaaabbbb", "aaaabbbbcccc"):
        query.prompts.send(text)
        await query.engine.until(f"prefill {text}")
        query.engine.finish(text)
        await query.engine.settle()
    assert await query.next() == Prefilled(12)
    await query.events.aclose()


async def test_an_answer_waits_for_a_slow_consumer() -> None:
    query = Query()
    query.prompts.send("?", is_complete=True)
    query.engine.answer(*"0123456789")
    assert await query.next() == AnswerChunk("0", ids("0"))
    await query.engine.settle()
    assert query.engine.chunks.qsize() >= 7
    assert [event async for event in query.events] == [AnswerChunk(text, ids(text)) for text in "123456789"]


# ------------------------------------------------------------------------------------------- errors and leaving early


async def test_an_error_of_the_prompts_is_raised_and_aborts_the_request_under_way() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.prompts.queue.put_nowait(LookupError("no pages"))
        with pytest.raises(LookupError, match="no pages"):
            await events
    assert query.engine.log[-1] == "abort aaaa"
    query.assert_nothing_is_left()


async def test_prompts_that_end_before_the_complete_one_are_an_error() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.prompts.queue.put_nowait(None)
        with pytest.raises(BackendError, match="without a complete one"):
            await events
    assert query.engine.log[-1] == "abort aaaa"
    query.assert_nothing_is_left()


async def test_an_error_while_prefilling_is_raised_and_closes_the_prompts() -> None:
    query = Query()
    async with query.consumed() as events:
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.engine.finish("aaaa", BackendError("out of blocks"))
        with pytest.raises(BackendError, match="out of blocks"):
            await events
    query.assert_nothing_is_left()


async def test_an_error_while_answering_is_raised_after_what_came_before_it() -> None:
    query = Query()
    query.prompts.send("?", is_complete=True)
    query.engine.chunks.put_nowait(AnswerChunk("4", ids("4")))
    query.engine.chunks.put_nowait(BackendError("broke off"))
    assert await query.next() == AnswerChunk("4", ids("4"))
    with pytest.raises(BackendError, match="broke off"):
        await query.next()
    query.assert_nothing_is_left()


async def bring_to(phase: str, query: Query) -> None:
    if phase == "waiting for a prompt":
        await query.engine.settle()
    elif phase == "prefilling":
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
    elif phase == "aborting":
        query.engine.may_abort.clear()
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.prompts.send("bbbb")
        await query.engine.until("prefill bbbb")
    elif phase == "prefilled":
        query.prompts.send("aaaa")
        await query.engine.until("prefill aaaa")
        query.engine.finish("aaaa")
        await query.engine.settle()
    elif phase == "waiting for the first token":
        query.prompts.send("?", is_complete=True)
        await query.engine.until("generate ?")
    else:
        assert phase == "answering"
        query.prompts.send("?", is_complete=True)
        query.engine.chunks.put_nowait(AnswerChunk("4", ids("4")))
        await query.engine.until("generate ?")
        await query.engine.settle()


PHASES = [
    "waiting for a prompt", "prefilling", "aborting", "prefilled", "waiting for the first token", "answering"
]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelling_the_consumer_leaves_nothing(phase: str) -> None:
    query = Query()
    async with query.consumed() as events:
        await bring_to(phase, query)
        events.cancel()
        await query.engine.settle()
        assert events.done() == (phase != "aborting")
        query.engine.may_abort.set()
        with pytest.raises(asyncio.CancelledError):
            await events
    query.assert_nothing_is_left()


@pytest.mark.parametrize("phase", ["prefilling", "answering"])
async def test_closing_between_two_events_leaves_nothing(phase: str) -> None:
    query = Query()
    query.prompts.send("aaaa")
    first = asyncio.create_task(query.next())
    await query.engine.until("prefill aaaa")
    query.engine.finish("aaaa")
    await first
    if phase == "prefilling":
        query.prompts.send("aaaabbbb")
        await query.engine.until("prefill aaaabbbb")
    else:
        query.prompts.send("aaaa?", is_complete=True)
        query.engine.chunks.put_nowait(AnswerChunk("4", ids("4")))
        await query.engine.until("generate aaaa?")
    await query.events.aclose()
    query.assert_nothing_is_left()


async def test_closing_waits_until_the_engine_has_heard_of_the_abort() -> None:
    query = Query()
    query.engine.may_abort.clear()
    query.prompts.send("aaaa")
    first = asyncio.create_task(query.next())
    await query.engine.until("prefill aaaa")
    first.cancel()
    await query.engine.settle()
    assert not first.done()
    query.engine.may_abort.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    query.assert_nothing_is_left()


async def test_a_generator_that_was_never_started_has_nothing_to_close() -> None:
    query = Query()
    await query.events.aclose()
    assert query.engine.log == []


@pytest.mark.parametrize("seed", range(100))
async def test_random_prompts_and_endings_keep_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    query = Query()
    text = ""
    sent: list[str] = [text]
    async with query.consumed() as events:
        for _ in range(30):
            if rng.random() < 0.5:
                text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.4 else text
                text += "".join(rng.choices("ab", k=rng.randrange(2 * BLOCK)))
                query.prompts.send(text)
                sent.append(text)
            pending = [line.removeprefix("prefill ") for line in query.engine.log if line.startswith("prefill")]
            if pending and not query.engine._endings[pending[-1]].done() and rng.random() < 0.5:
                query.engine.finish(pending[-1])
            if rng.random() < 0.7:
                await query.engine.settle()
                assert query.engine.num_open <= 1
            if query.engine.log and query.engine.log[-1].startswith("prefill"):
                wanted = query.engine.log[-1].removeprefix("prefill ")
                assert len(wanted) % BLOCK == 0
                assert any(prompt.startswith(wanted) for prompt in sent)
        query.prompts.send(text + "?", is_complete=True)
        query.engine.answer("4")
        *reports, answer = await events
        assert answer == AnswerChunk("4", ids("4"))
        assert all(isinstance(report, Prefilled) and report.num_tokens % BLOCK == 0 for report in reports)
    assert query.engine.log[-2:] == [f"generate {text}?", "generate ended"]
    query.assert_nothing_is_left()
