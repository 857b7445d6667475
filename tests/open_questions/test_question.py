"""Questions that are still being asked: what begins early, what is kept, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from streamrag import Append, Chunk, Pipeline, Prompt, SamplingParams, TraceRecorder, Turn, Update
from streamrag.core import SourceEvent
from streamrag.errors import ConfigurationError, PipelineClosedError, SourceError, StreamRagError
from streamrag.open_questions import WaitForWords, content_words
from streamrag.open_questions.held_source import WithFound
from streamrag.telemetry import ChunkArrived, QueryEvent
from streamrag.testing import ScriptedBackend, ScriptedSource
from streamrag.trace import read_trace
from tests.query.test_answer_ahead import DraftingBackend

PAGE = Chunk("A task group is cancelled by its scope.", "tasks.md")
SOON_S = 0.01
AT_ONCE = WaitForWords(settle_s=0, pause_s=0)
NEVER = WaitForWords(settle_s=60, pause_s=60)


class CountingSource:
    """Finds one page for each question, and remembers the questions."""

    def __init__(self, error: Exception | None = None) -> None:
        self.questions: list[str] = []
        self.num_open = 0
        self.error = error

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        self.questions.append(query)
        self.num_open += 1
        try:
            yield Append(PAGE)
            await anyio.sleep(SOON_S)
            if self.error is not None:
                raise self.error
        finally:
            self.num_open -= 1


async def until(holds: object) -> None:
    async with asyncio.timeout(120):
        while not holds():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def complete(backend: ScriptedBackend) -> list[Prompt]:
    return [prompt for prompts in backend.prompts for prompt in prompts if prompt.is_complete]


def newest_prompt(backend: ScriptedBackend) -> str:
    prompts = backend.prompts[-1] if backend.prompts else []
    return backend.model.tokenizer.decode(prompts[-1].token_ids) if prompts else ""


async def one_shot(question: str) -> Prompt:
    """The complete prompt of a question that is asked as a whole."""
    backend = ScriptedBackend()
    async with Pipeline(CountingSource(), backend, overlap=False) as pipeline:
        assert [chunk async for chunk in pipeline.stream(question)]
    (prompt,) = complete(backend)
    return prompt


async def test_a_partial_question_is_retrieved_and_prefilled_and_its_commit_only_completes_the_prompt() -> None:
    source, backend = CountingSource(), ScriptedBackend("By its scope.")
    async with Pipeline(source, backend) as pipeline, pipeline.listen(rule=AT_ONCE) as question:
        await question.partial("how do I cancel a task")
        await until(lambda: backend.prompts and backend.prompts[0])
        await asyncio.sleep(5 * SOON_S)
        assert complete(backend) == [], "nothing is answered before the question is committed"
        answer = question.commit("how do I cancel a task")
        assert "".join([chunk.text async for chunk in answer]) == "By its scope."
        assert answer.result.citations[0].uri == "tasks.md"
        assert (source.questions, question.num_retrievals) == (["how do I cancel a task"], 1)
    (prompt,) = complete(backend)
    assert prompt.token_ids == (await one_shot("how do I cancel a task")).token_ids
    assert (backend.num_requests, source.num_open, pipeline.num_queries) == (0, 0, 0)


async def test_another_committed_question_has_a_retrieval_of_its_own() -> None:
    source, backend = CountingSource(), ScriptedBackend("By its scope.")
    async with Pipeline(source, backend) as pipeline, pipeline.listen(rule=AT_ONCE) as question:
        await question.partial("how do I cancel")
        await until(lambda: source.questions)
        assert [chunk async for chunk in question.commit("How do I cancel a task group?")]
    assert source.questions == ["how do I cancel", "How do I cancel a task group?"]
    (prompt,) = complete(backend)
    assert prompt.token_ids == (await one_shot("How do I cancel a task group?")).token_ids
    assert (backend.num_requests, source.num_open, pipeline.num_queries) == (0, 0, 0)


async def test_retrieval_begins_at_stable_content_words_and_up_to_max_retrievals() -> None:
    source = CountingSource()
    async with (
        Pipeline(source, ScriptedBackend()) as pipeline,
        pipeline.listen(rule=WaitForWords(0.03, 0.03), max_retrievals=2) as question,
    ):
        for text in ("how", "how do", "how do I", "how do I can", "how do I canc", "how do I cancel"):
            await question.partial(text)
        await until(lambda: source.questions)
        for text in ("how do I cancel a task", "how do I cancel a task group", "how do I cancel a task group?"):
            await question.partial(text)
            await asyncio.sleep(0.1)
        assert source.questions == ["how do I cancel", "how do I cancel a task"]
        assert source.num_open <= 1
    assert (source.num_open, pipeline.num_queries) == (0, 0)


async def test_a_rule_of_the_caller_decides_and_knows_what_was_retrieved_last() -> None:
    source, told = CountingSource(), list[tuple[str, str]]()

    def rule(text: str, retrieved: str) -> float | None:
        told.append((text, retrieved))
        return 0.0 if text.endswith("?") else None

    async with (
        Pipeline(source, ScriptedBackend()) as pipeline,
        pipeline.listen(rule=rule) as question,
    ):
        await question.partial("Cancel?")
        await until(lambda: source.questions)
        await question.partial("Cancel tasks")
    assert told == [("Cancel?", ""), ("Cancel tasks", "Cancel?")]


async def test_a_draft_is_made_before_the_question_is_committed_and_is_the_answer() -> None:
    backend = DraftingBackend()
    source = ScriptedSource([Append(Chunk("alpha", "a.md"))])
    async with Pipeline(source, backend, answer_ahead=True) as pipeline, pipeline.listen(rule=AT_ONCE) as question:
        await question.partial("which letter")
        await until(lambda: backend.num_requests == 1 and len(backend.drafts) == 1)  # the draft has ended
        answer = question.commit("which letter")
        assert "".join([chunk.text async for chunk in answer]) == "see alpha"
    assert answer.result.draft is not None
    assert answer.result.draft.num_accepted == len("see alpha")


async def test_a_question_that_is_never_committed_costs_one_place_for_a_while() -> None:
    source, backend = CountingSource(), ScriptedBackend()
    async with Pipeline(source, backend) as pipeline, pipeline.listen(rule=AT_ONCE, idle_s=1) as question:
        await question.partial("how do I cancel")
        await until(lambda: source.questions and pipeline.num_queries == 0)
        assert backend.num_requests == 0
        await question.partial("how do I cancel")  # asked again: worth it again
        await until(lambda: len(source.questions) == 2)
    assert (source.num_open, pipeline.num_queries, backend.num_requests) == (0, 0, 0)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("is_committed", [True, False])
async def test_leaving_or_cancelling_at_any_moment_leaves_nothing_behind(after_s: float, is_committed: bool) -> None:
    source, backend = CountingSource(), DraftingBackend(pause_s=0.01)
    async with Pipeline(source, backend, answer_ahead=True) as pipeline:
        with anyio.move_on_after(after_s):
            async with pipeline.listen(rule=WaitForWords(0.002, 0.002)) as question:
                await question.partial("cancel tasks")
                await asyncio.sleep(0.005)
                await question.partial("cancel task groups")
                await asyncio.sleep(0.02)
                if is_committed:
                    async for _ in question.commit("cancel task groups"):
                        pass
                await asyncio.sleep(1)
        assert (source.num_open, backend.num_requests, pipeline.num_queries) == (0, 0, 0)
        assert not [task for task in asyncio.all_tasks() if "open question" in task.get_name()]


async def test_a_failure_ahead_is_raised_when_the_question_is_committed() -> None:
    source = CountingSource(SourceError("the site is down"))
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        for text in ("cancel tasks", "another question"):
            async with pipeline.listen(rule=AT_ONCE) as question:
                await question.partial("cancel tasks")
                await asyncio.sleep(5 * SOON_S)
                with pytest.raises(SourceError, match="the site is down"):
                    assert [chunk async for chunk in question.commit(text)]


async def test_a_source_that_is_none_is_told_as_without_listening() -> None:
    class Coroutine:
        async def stream(self, query: str) -> None: ...

    async with Pipeline(Coroutine(), ScriptedBackend()) as pipeline, pipeline.listen(rule=AT_ONCE) as question:  # type: ignore[arg-type]
        await question.partial("cancel tasks")
        await asyncio.sleep(5 * SOON_S)
        with pytest.raises(SourceError, match=r"Coroutine\.stream is a coroutine"):
            assert [chunk async for chunk in question.commit("cancel tasks")]


async def test_a_full_pipeline_has_no_query_ahead_and_the_committed_one_says_why() -> None:
    source, hold = CountingSource(), anyio.Event()
    async with Pipeline(source, ScriptedBackend(hold=hold), max_concurrent_queries=1, when_full="refuse") as pipeline:
        async with pipeline.stream("first"), pipeline.listen(rule=AT_ONCE) as question:
            await until(lambda: source.questions)
            await question.partial("cancel tasks")
            await asyncio.sleep(5 * SOON_S)
            assert (question.num_retrievals, source.questions) == (0, ["first"])
            with pytest.raises(StreamRagError, match="max_concurrent_queries=1"):
                assert [chunk async for chunk in question.commit("cancel tasks")]


async def test_misuse_is_refused_with_what_to_do() -> None:
    pipeline = Pipeline(CountingSource(), ScriptedBackend())
    async with pipeline:
        for options, words in (
            ({"deadline_s": 3}, r"deadline_s=3.*asyncio\.timeout"),
            ({"max_retrievals": -1}, "max_retrievals=-1"),
            ({"idle_s": 0}, "idle_s=0"),
            ({"params": "none"}, "params"),
            ({"parms": SamplingParams()}, "no option 'parms'"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                pipeline.listen(**options)
        async with pipeline.listen() as question:
            question.commit("Why?")
            with pytest.raises(StreamRagError, match=r"committed: begin another one with pipeline\.listen\(\)"):
                await question.partial("Why")
        closed = pipeline.listen()
        await closed.aclose()
        with pytest.raises(StreamRagError, match="closed"):
            closed.commit("Why?")
        late = pipeline.listen(rule=AT_ONCE)
    with pytest.raises(PipelineClosedError):
        assert [chunk async for chunk in late.commit("Why?")]


async def test_queries_ahead_are_neither_recorded_nor_learned_from(tmp_path: Path) -> None:
    """Their retrieval ends with the commit, which says nothing of the source."""
    path = tmp_path / "trace.jsonl"
    async with Pipeline(CountingSource(), ScriptedBackend(), recorder=TraceRecorder(path)) as pipeline:
        for text in ("cancel tasks", "cancel task groups"):
            async with pipeline.listen(rule=AT_ONCE) as question:
                await question.partial("cancel tasks")
                await until(lambda question=question: question.num_retrievals)
                answer = question.commit(text)
                assert [chunk async for chunk in answer]
            assert answer.result.overlap is not None
            assert (answer.result.overlap.reason == "overlap=True") == (text == "cancel tasks")
    assert [query.text for query in read_trace(path).queries] == ["cancel task groups"]


def test_content_words_name_something() -> None:
    assert content_words("How do I cancel THE task?") == {"cancel", "task"}


@pytest.mark.parametrize(
    ("text", "retrieved", "wait_s"),
    [
        ("", "", None),
        ("how can I", "", None),
        ("how can I cancel", "", 2.0),
        ("how can I cancel a task", "", 1.0),
        ("how can I cancel a task group", "how can I cancel a task", 2.0),
        ("how can I cancel a task group of another scope", "how can I cancel a task", 1.0),
        ("how can I cancel a task", "how can I canc a ta", 2.0),
        ("how can I close a task", "how can I cancel a task", 1.0),
        ("how can I", "how can I cancel a task", None),
        ("how can I cancel a task", "how can I cancel a task", None),
        ("how can I cancel a task?", "how can I cancel a task", 2.0),
    ],
)
def test_a_question_lasts_longer_if_it_has_few_new_words(text: str, retrieved: str, wait_s: float | None) -> None:
    assert WaitForWords(settle_s=1, pause_s=2)(text, retrieved) == wait_s


async def test_a_final_transcript_does_not_wait() -> None:
    source = CountingSource()
    async with Pipeline(source, ScriptedBackend("Yes.")) as pipeline, pipeline.listen(rule=NEVER) as question:
        await question.partial("cancel tasks")
        await asyncio.sleep(3 * SOON_S)
        assert source.questions == []
        await question.partial("cancel tasks", is_final=True)
        await until(lambda: source.questions)
        assert [chunk async for chunk in question.commit("cancel tasks")]
        assert source.questions == ["cancel tasks"]
        assert pipeline.queries_ahead is not None
        assert (pipeline.queries_ahead.num_begun, pipeline.queries_ahead.num_used) == (1, 1)


async def test_a_transcript_that_comes_again_unchanged_does_not_put_off_its_retrieval() -> None:
    source = CountingSource()
    async with Pipeline(source, ScriptedBackend()) as pipeline, pipeline.listen(rule=lambda *texts: 0.1) as question:
        async with asyncio.timeout(120):
            while not source.questions:
                await question.partial("cancel tasks")
                await asyncio.sleep(SOON_S)


async def test_passages_found_by_queries_ahead_may_stand_in_the_context_too() -> None:
    class PageForEach(CountingSource):
        async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            self.questions.append(query)
            yield Append(Chunk(f"A page about {query}.", query))

    async def sources_of_context(passages: Literal["own", "all"]) -> set[str]:
        source, backend = PageForEach(), ScriptedBackend("Yes.")
        async with Pipeline(source, backend) as pipeline:
            async with pipeline.listen(rule=AT_ONCE, passages=passages) as question:
                for text in ("tasks", "streams", "sockets"):
                    await question.partial(text)
                    await until(lambda: f"about {text}." in newest_prompt(backend))  # noqa: B023
                answer = question.commit("files")
                assert [chunk async for chunk in answer]
            assert source.questions == ["tasks", "streams", "sockets", "files"]
        return {citation.uri for citation in answer.result.citations}

    assert await sources_of_context("own") == {"files"}
    assert await sources_of_context("all") == {"files", "tasks", "streams", "sockets"}


async def test_a_query_ahead_with_passages_of_others_goes_on_when_it_is_committed() -> None:
    source, backend = CountingSource(), ScriptedBackend("Yes.")
    async with Pipeline(source, backend) as pipeline, pipeline.listen(rule=AT_ONCE, passages="all") as question:
        for text in ("tasks", "task groups"):
            await question.partial(text)
            await until(lambda text=text: text in source.questions)
            await asyncio.sleep(3 * SOON_S)
        assert [chunk async for chunk in question.commit("task groups")]
        assert source.questions == ["tasks", "task groups"]


async def test_queries_ahead_take_at_most_half_of_the_places_and_what_they_computed_is_counted() -> None:
    source, backend = CountingSource(), ScriptedBackend("Yes.")
    async with Pipeline(source, backend, max_concurrent_queries=4) as pipeline, AsyncExitStack() as stack:
        questions = [await stack.enter_async_context(pipeline.listen(rule=AT_ONCE)) for _ in range(3)]
        for number, question in enumerate(questions):
            await question.partial(f"tasks {number}")
        await until(lambda: len(backend.prompts) == 2 and all(backend.prompts))
        await asyncio.sleep(5 * SOON_S)
        counts = pipeline.queries_ahead
        assert counts is not None
        assert (counts.num_running, counts.num_begun, pipeline.num_queries) == (2, 2, 2)
        assert [chunk async for chunk in questions[0].commit("other tasks")]
        assert (counts.num_running, counts.num_used) == (1, 0)
        assert counts.num_unused_tokens == questions[0].num_unused_tokens > 0
        await questions[2].partial("tasks 2", is_final=True)  # there is a place now
        await until(lambda: source.questions[-1] == "tasks 2")
    assert (counts.num_running, counts.num_begun, counts.num_used) == (0, 3, 0)


async def test_a_rule_that_returns_no_seconds_is_refused() -> None:
    async with Pipeline(CountingSource(), ScriptedBackend()) as pipeline:
        async with pipeline.listen(rule=lambda text, retrieved: "soon") as question:  # type: ignore[arg-type, return-value]
            with pytest.raises(ConfigurationError, match="the rule's result='soon'"):
                await question.partial("tasks")


async def test_the_committed_retrieval_fails_as_without_passages_of_others() -> None:
    source, backend = CountingSource(), ScriptedBackend("Yes.")
    async with Pipeline(source, backend) as pipeline, pipeline.listen(rule=AT_ONCE, passages="all") as question:
        await question.partial("tasks")
        await until(lambda: backend.prompts and backend.prompts[0])
        source.error = SourceError("the site is down")
        with pytest.raises(SourceError, match="the site is down"):
            assert [chunk async for chunk in question.commit("task groups")]


async def test_passages_of_others_follow_those_of_an_update() -> None:
    own = ScriptedSource([Update((Chunk("new", "new.md"), Chunk("both", "both.md")))])
    source = WithFound(own, [Chunk("both", "both.md"), Chunk("old", "old.md")])
    events = [event async for event in source.stream("?")]
    uris = [[chunk.uri for chunk in (event.chunks if isinstance(event, Update) else [event.chunk])] for event in events]  # type: ignore[union-attr]
    assert uris == [["both.md"], ["old.md"], ["new.md", "both.md", "old.md"]]


async def test_a_full_pipeline_that_refuses_has_a_place_for_the_commit_of_its_own_query_ahead() -> None:
    source, backend = CountingSource(), ScriptedBackend("Yes.")
    async with Pipeline(source, backend, max_concurrent_queries=1, when_full="refuse") as pipeline:
        async with pipeline.listen(rule=AT_ONCE) as question:
            for text in ("tasks", "task groups"):
                await question.partial(text)
                await until(lambda text=text: text in source.questions)
            assert "".join([chunk.text async for chunk in question.commit("streams")]) == "Yes."
        assert pipeline.queries_ahead is not None
        assert (pipeline.queries_ahead.num_running, pipeline.queries_ahead.num_begun) == (0, 2)


async def test_events_of_a_query_ahead_end_when_another_question_is_committed() -> None:
    seen: list[str] = []

    class Endless(CountingSource):
        async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            self.questions.append(query)
            for number in range(1_000 if query == "tasks" else 1):
                yield Append(Chunk(f"{query} {number}", query))
                await asyncio.sleep(0)

    def on_event(event: QueryEvent) -> None:
        if isinstance(event, ChunkArrived):
            seen.append(event.chunk.uri)

    source = Endless()
    async with Pipeline(source, ScriptedBackend("Yes.")) as pipeline:
        async with pipeline.listen(rule=AT_ONCE, on_event=on_event) as question:
            await question.partial("tasks")
            await until(lambda: seen)
            answer = question.commit("streams")
            num_before = len(seen)
            assert [chunk async for chunk in answer]
    assert seen[num_before:] == ["streams"]


async def test_closing_that_is_cancelled_stops_everything_too() -> None:
    source = CountingSource()
    async with Pipeline(source, ScriptedBackend("Yes.")) as pipeline:
        for num_turns in range(1, 5):
            question = pipeline.listen(rule=AT_ONCE)
            await question.partial("tasks")
            await until(lambda: source.num_open == 1)
            closing = asyncio.create_task(question.aclose())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            closing.cancel()
            await until(lambda: pipeline.num_queries == 0 and pipeline.queries_ahead.num_running == 0)  # type: ignore[union-attr]


async def test_a_rule_that_raises_leaves_the_query_ahead_its_end() -> None:
    def rule(text: str, retrieved: str) -> float:
        return 0.0 if text == "tasks" else 1 / 0

    source = CountingSource()
    async with Pipeline(source, ScriptedBackend()) as pipeline, pipeline.listen(rule=rule, idle_s=0.5) as question:
        await question.partial("tasks")
        await until(lambda: source.questions)
        with pytest.raises(ZeroDivisionError):
            await question.partial("task groups")
        await until(lambda: pipeline.num_queries == 0)


async def test_options_that_are_none_are_not_given() -> None:
    source = CountingSource()
    async with Pipeline(source, ScriptedBackend("Yes.")) as pipeline:
        options: dict[str, Any] = {"deadline_s": None, "overlap": None, "history": iter([Turn("user", "Hi")])}
        async with pipeline.listen(rule=AT_ONCE, **options) as question:
            await question.partial("tasks")
            await until(lambda: question.num_retrievals)
            answer = question.commit("tasks")
            assert [chunk async for chunk in answer]
    assert answer.result.overlap is not None
    assert answer.result.overlap.reason == "overlap=True"
    assert answer.result.num_prompt_tokens > (await num_tokens_without_history())


async def num_tokens_without_history() -> int:
    return len((await one_shot("tasks")).token_ids)
