"""The main job on real parts: a crawl over HTTP and a DiskANN index into a vLLM, and stopping it in every phase."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent / "sources"))
from website import Website

from streamrag import (
    AnswerStream,
    Append,
    Chunk,
    CrawlOptions,
    Pipeline,
    SamplingParams,
    Turn,
    VectorSource,
    VllmBackend,
    WebSource,
    from_tokens,
)
from streamrag.cli.conversation import ChatHistory
from streamrag.errors import SourceError
from streamrag.query.answer_stream import EventStream
from streamrag.sources.index.build import build_index
from streamrag.telemetry import (
    Answer,
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    PrefillProgressed,
    QueryEvent,
    RetrievalStarted,
    TokensGenerated,
)
from streamrag.testing import ScriptedSource, make_tiny_llama

pytest.importorskip("vllm")
pytest.importorskip("crawl4ai")
pytest.importorskip("diskannpy")
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

QUERY = "How does the printer handle thick paper?"
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
MANY = SamplingParams(max_tokens=4000, ignore_eos=True)


def page(number: int, links: str = "") -> str:
    rows = "".join(
        f"<p>Printer {number} handles thick paper in tray {row}, at {row * 7} pages a minute.</p>" for row in range(12)
    )
    return f"<title>Printer {number}</title><h1>Printer {number}</h1>{links}{rows}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmBackend]:
    # Large enough that prefilling a few pages takes a while.
    model = make_tiny_llama(
        tmp_path_factory.mktemp("models") / "model", hidden_size=256, num_layers=8, num_heads=8, max_model_len=16384
    )
    backend = VllmBackend(model, engine_args={"dtype": "float32"}, max_num_batched_tokens=256, kv_cache_bytes=1 << 29)
    await backend.start(print)
    try:
        # vLLM's own tasks start with this one.
        async with Pipeline(ScriptedSource([]), backend, owns_backend=False) as pipeline:
            assert [chunk async for chunk in pipeline.stream(QUERY, params=PARAMS)]
        yield backend
    finally:
        await backend.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Website]:
    website = Website()
    links = "".join(f'<a href="/{number}">{number}</a> ' for number in range(1, 5))
    website.add("/", page(0, links))
    for number in range(1, 5):
        website.add(f"/{number}", page(number))
    website.add("/gated", page(9))
    website.add("/start", page(8, '<a href="/gated">more</a>'))
    async with website.running():
        yield website


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(site: Website) -> AsyncIterator[WebSource]:
    source = WebSource(lambda query: [site.url(query.split()[-1])], CrawlOptions(allow_private=True, num_workers=1))
    await source.start(print)
    try:
        yield source
    finally:
        await source.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vector(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VectorSource]:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"{number}.html").write_text(page(number))
    await asyncio.to_thread(build_index, folder, folder.parent / "index")
    source = VectorSource(folder.parent / "index", k=4)
    await source.start(print)
    try:
        yield source
    finally:
        await source.aclose()


async def nothing_is_left(pipeline: Pipeline, backend: VllmBackend, site: Website, before: set[str]) -> None:
    assert pipeline.num_queries == 0
    await site.until_all_closed()
    # the engine hears of an abort between two of its steps
    while await backend.num_unfinished_requests():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert {task.get_name() for task in asyncio.all_tasks()} - before == set()


def tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize("kind", ["crawl", "search"])
async def test_streaming_and_waiting_give_the_same_answer_with_its_sources(
    kind: str, backend: VllmBackend, web: WebSource, vector: VectorSource, site: Website
) -> None:
    source, query = (web, f"{QUERY} /start") if kind == "crawl" else (vector, QUERY)
    site.gates.clear()
    before = tasks()
    async with Pipeline(source, backend, owns_source=False, owns_backend=False) as pipeline:
        answers = []
        for overlap in (True, False):
            assert await backend.reset_prefix_cache()
            stream = pipeline.stream(query, params=PARAMS, overlap=overlap)
            text = "".join([chunk.text async for chunk in stream])
            assert text == stream.result.text
            answers.append(stream.result)
        streaming, waiting = answers
        assert streaming.citations == waiting.citations
        assert len(streaming.citations) == (2 if kind == "crawl" else 4)
        assert streaming.token_ids == waiting.token_ids
        assert len(streaming.token_ids) == 16
        assert streaming.is_exact
        await nothing_is_left(pipeline, backend, site, before)


@pytest.mark.parametrize("min_chars", [1, 32])
async def test_the_text_that_one_model_writes_gives_the_answer_of_the_whole_text(
    min_chars: int, backend: VllmBackend, site: Website
) -> None:
    async def whole(stream: AnswerStream) -> AsyncIterator[str]:
        yield "".join([chunk.text async for chunk in stream])

    before = tasks()
    notes = ScriptedSource([Append(Chunk(page(1), "printer"))])
    async with Pipeline(notes, backend, owns_backend=False) as writer:
        answers, texts = [], []
        for is_streaming in (True, False):
            assert await backend.reset_prefix_cache()
            written = writer.stream(QUERY, params=SamplingParams(max_tokens=100, ignore_eos=True))
            source = from_tokens(written if is_streaming else whole(written), name="notes", min_chars=min_chars)
            async with Pipeline(source, backend, owns_backend=False, overlap=True) as reader:
                stream = reader.stream(QUERY, params=PARAMS)
                _ = [chunk async for chunk in stream]
            answers.append(stream.result)
            texts.append(written.result.text)
        streaming, waiting = answers
        assert texts[0] == texts[1] == streaming.citations[0].text
        assert streaming.citations == waiting.citations
        assert streaming.token_ids == waiting.token_ids
        assert streaming.record is not None
        assert len(streaming.record.chunks) > 5
        await nothing_is_left(writer, backend, site, before)


async def test_the_head_is_computed_before_the_first_passage_arrives_and_the_answer_is_the_same(
    backend: VllmBackend, site: Website
) -> None:
    before = tasks()
    history = [Turn("user", page(3)), Turn("assistant", page(4))]
    answers = []
    for overlap in (True, False):
        assert await backend.reset_prefix_cache()
        may_find = anyio.Event()
        source = ScriptedSource([may_find, Append(Chunk(page(1), "printer"))])
        async with Pipeline(source, backend, owns_backend=False) as pipeline:
            async with pipeline.events(QUERY, history=history, params=PARAMS, overlap=overlap) as events:
                async for event in events:
                    if isinstance(event, PrefillProgressed) or not overlap:
                        may_find.set()
        answers.append(events.result)
    streaming, waiting = answers
    assert streaming.token_ids == waiting.token_ids
    assert streaming.num_invalidated == 0
    assert streaming.record is not None
    head, passage, complete = streaming.record.chunks
    assert head.num_tokens > 500
    assert passage.num_computed == head.num_tokens - 1, "the last token of a partial prompt is hidden"
    assert passage.num_shared == head.num_tokens
    assert complete.num_tokens == waiting.num_prompt_tokens
    failing = ScriptedSource([0.05, OSError("refused")])
    async with Pipeline(failing, backend, owns_backend=False, overlap=True) as pipeline:
        with pytest.raises(SourceError, match="refused"):
            _ = [chunk async for chunk in pipeline.stream(QUERY, history=history)]
        await nothing_is_left(pipeline, backend, site, before)


PHASES = {
    "before the first page": RetrievalStarted,
    "while crawling": ChunkArrived,
    "while prefilling": ContextComplete,
    "while decoding": TokensGenerated,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["leaving the block", "cancelling the task"])
async def test_stopping_in_any_phase_leaves_nothing_behind(
    phase: str, how: str, backend: VllmBackend, web: WebSource, site: Website
) -> None:
    site.gates.clear()
    site.requests.clear()
    if phase == "before the first page":
        site.add_gate("/start")
    elif phase == "while crawling":
        site.add_gate("/gated")
    assert await backend.reset_prefix_cache()
    before = tasks()
    async with Pipeline(web, backend, owns_source=False, owns_backend=False) as pipeline:
        reached = asyncio.Event()

        async def read(events: EventStream) -> None:
            async for event in events:
                if isinstance(event, PHASES[phase]):
                    if phase == "before the first page":
                        await site.until_asked("/start")
                    reached.set()
                    if how == "leaving the block":
                        return

        async def ask() -> None:
            async with pipeline.events(f"{QUERY} /start", params=MANY) as events:
                await read(events)

        asking = asyncio.create_task(ask(), name="asking")
        async with asyncio.timeout(60):
            await reached.wait()
        if how == "cancelling the task":
            asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() == (how == "cancelling the task")
        assert web._workers
        assert web._workers.num_busy == 0
        await nothing_is_left(pipeline, backend, site, before)
        for gate in site.gates.values():
            gate.set()


async def test_stopping_a_search_leaves_nothing_behind(
    backend: VllmBackend, vector: VectorSource, site: Website
) -> None:
    before = tasks()
    async with Pipeline(vector, backend, owns_source=False, owns_backend=False) as pipeline:
        for kind in (RetrievalStarted, ContextChanged, TokensGenerated):
            async with pipeline.events(QUERY, params=MANY) as events:
                async for event in events:
                    if isinstance(event, kind):
                        break
            assert vector._opened
            assert vector._opened.workers.num_busy == 0
            await nothing_is_left(pipeline, backend, site, before)


async def test_a_page_of_the_wrong_type_is_skipped_and_the_answer_has_no_context(
    backend: VllmBackend, web: WebSource, site: Website
) -> None:
    site.add("/picture", b"\x89PNG", content_type="image/png")
    async with Pipeline(web, backend, owns_source=False, owns_backend=False) as pipeline:
        async with aclosing(pipeline.events(f"{QUERY} /picture", params=PARAMS)) as stream:
            events: list[QueryEvent] = [event async for event in stream]
        skipped = [event for event in events if isinstance(event, DocumentSkipped)]
        assert [event.uri for event in skipped] == [site.url("/picture")]
        assert "image/png" in skipped[0].reason
        assert not stream.result.has_context
        assert len(stream.result.token_ids) == 16


async def test_many_queries_at_once_are_answered_as_if_each_were_alone(
    backend: VllmBackend, web: WebSource, vector: VectorSource
) -> None:
    async def ask(pipeline: Pipeline, query: str) -> tuple[int, ...]:
        stream = pipeline.stream(query, params=PARAMS)
        _ = [chunk async for chunk in stream]
        return stream.result.token_ids

    queries = [f"{QUERY} Number {number}?" for number in range(6)]
    async with Pipeline(vector, backend, owns_source=False, owns_backend=False) as pipeline:
        together = await asyncio.gather(*(ask(pipeline, query) for query in queries))
        alone = []
        for query in queries:
            assert await backend.reset_prefix_cache()
            alone.append(await ask(pipeline, query))
    assert together == alone


async def test_a_conversation_keeps_the_kv_of_its_history_and_answers_as_if_each_question_were_alone(
    backend: VllmBackend,
) -> None:
    passages = [Append(Chunk(f"Tray {row} takes thick paper. " * 20, f"tray-{row}.html")) for row in range(3)]
    async with Pipeline(ScriptedSource(passages), backend, owns_backend=False) as pipeline:
        histories: list[tuple[Turn, ...]] = []

        async def ask(question: str, history: tuple[Turn, ...]) -> Answer:
            histories.append(history)
            stream = pipeline.stream(question, history=history, params=PARAMS)
            _ = [chunk async for chunk in stream]
            return stream.result

        conversation = ChatHistory(ask, max_characters=10_000)
        await backend.reset_prefix_cache()
        asked = ["Which tray? " * 60, "And how fast? " * 60, "Why? " * 60]
        answers = [await conversation.ask(question) for question in asked]
        for question, history, answer in zip(asked, tuple(histories), answers, strict=True):
            await backend.reset_prefix_cache()
            assert (await ask(question, history)).token_ids == answer.token_ids
    cached = [answer.record.num_from_cache for answer in answers if answer.record]
    assert cached[0] == 0
    assert cached[2] > cached[1] > 0, "the first turn stands in the prompt of the third"
