import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from source_helpers import alive, citations, events_of, must_be_started, running, stages_left, until, updates
from topics import TOPICS, write_topics
from toy_corpus import EMBEDDER, exact_ranking, write_documents
from toy_corpus import QUERIES as TOY_QUERIES
from toy_reranker import text_score

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update
from streamrag.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexMissingError,
    MissingDependencyError,
    SourceError,
    WorkerError,
)
from streamrag.sources.index.build import build_index
from streamrag.sources.index.changes import add_documents, remove_documents
from streamrag.sources.index.index_folder import looks_like_index
from streamrag.sources.search.hybrid import HybridSource
from streamrag.sources.workers.pool import WorkerPool
from streamrag.testing import ScriptedSource

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

BACKWARDS = "toy_reranker:backwards"
QUERIES = TOY_QUERIES[:10]


@pytest.fixture(scope="module")
def built(toy_index: Callable[[int], Path]) -> Path:
    return toy_index(300)


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """An index to damage or replace."""
    return Path(shutil.copytree(built, tmp_path / "index"))


def started(index: Path, **options: Any) -> AbstractAsyncContextManager[HybridSource]:
    return running(HybridSource(index, **{"embedder": EMBEDDER} | options))


def pools(source: HybridSource) -> list[WorkerPool]:
    assert source._opened
    reranker = source._opened.reranker
    return [source._opened.keywords, *([reranker.workers] if reranker else [])]


def uris(update: SourceEvent) -> list[str]:
    assert isinstance(update, Update)
    return [chunk.uri for chunk in update.chunks]


# -------------------------------------------------------------------------------------------------------- searching


async def test_keywords_come_first_then_the_fusion_then_each_batch_that_changes_something(built: Path) -> None:
    async with started(built, reranker=BACKWARDS, k=5, candidates=20, batch_size=4) as source:
        for number, query in enumerate(QUERIES):
            found = await updates(source, query)
            words = set(query.split())
            passages = {uri: (built.parent / "index-documents" / uri).read_text() for uri in uris(found[0])}
            assert all(words & set(text.split()) for text in passages.values())
            hints = [update.hint for update in found]
            assert stages_left(found)[:2] == [6, 5]
            # The first query does not know how long a batch takes until it has scored one.
            num_unknown = 2 if number == 0 else 0
            assert [hint is None or hint.end_s is None for hint in hints] == [
                n < num_unknown for n in range(len(found))
            ]
            assert {len(set(update.chunks)) for update in found} == {5}
            assert {chunk.score for update in found for chunk in update.chunks} == {None}
            # 4 of 20 were scored in each batch, so after the second all five are in the order of their scores.
            for update in found[2:]:
                scores = [text_score(f"{chunk.title}\n{chunk.text}") for chunk in update.chunks]
                num_sorted = 5 if ((update.hint and update.hint.num_chunks) or 0) < 4 else 4
                assert scores[:num_sorted] == sorted(scores[:num_sorted], reverse=True)


async def test_the_last_update_has_the_best_of_all_candidates(built: Path) -> None:
    async with started(built, reranker=BACKWARDS, k=3, candidates=300, batch_size=50) as source:
        last = (await updates(source, QUERIES[0]))[-1]
    everything = sorted((f"{number:04}.txt" for number in range(300)), reverse=True)
    assert uris(last) == everything[:3]  # a toy's score is that of the title, which comes first
    assert last.hint
    assert (last.hint.num_chunks or 0) < 6


async def test_without_a_reranker_the_fusion_is_the_last_update(built: Path) -> None:
    async with started(built, k=5) as source:
        for query in QUERIES:
            found = await updates(source, query)
            assert 1 <= len(found) <= 2
            assert found[0].hint == Hint(1) or (found[0].hint and found[0].hint.end_s is not None)
        exact = [name for name, _ in exact_ranking(built, QUERIES[-1])]
        assert exact[0] in uris(found[-1])
        assert found[-1].hint
        assert (found[-1].hint.num_chunks, found[-1].hint.end_s) in ((0, 0.0), (1, found[-1].hint.end_s))


async def test_reranking_few_passages_does_not_shorten_the_searches(built: Path) -> None:
    async with started(built, k=5) as whole, started(built, k=5, candidates=5, reranker=BACKWARDS) as short:
        for query in QUERIES:
            expected, actual = [(await updates(source, query))[-1] for source in (whole, short)]
            assert set(actual.chunks) == set(expected.chunks)


async def test_words_that_no_passage_has_leave_it_to_the_vectors(built: Path) -> None:
    async with started(built, k=4) as source:
        (update,) = await updates(source, "zebra")
    assert len(update.chunks) == 4


async def test_a_source_of_another_kind_may_search_by_vectors(built: Path) -> None:
    text = (built.parent / "index-documents" / "0007.txt").read_text()
    seventh, other = Chunk(text, "0007.txt", "0007", 0, 0.5), Chunk("Somewhere else.", "other.txt")
    vectors = ScriptedSource(
        [
            Skipped("a", "too large"),
            Append(other),
            Update((seventh, other), Hint(1)),
            Append(other),
            CutShort("no time"),
        ]
    )
    async with started(built, k=3, vectors=vectors) as source:
        found = await events_of(source, text)
    assert isinstance(found[0], Update)
    assert found[0].chunks[0] == Chunk(text, "0007.txt", "0007")
    assert found[1] == Skipped("a", "too large")
    assert found[-1] == CutShort("no time")
    assert uris(found[-2])[:2] == ["0007.txt", "other.txt"]  # the vectors count twice


@pytest.mark.long  # three processes load models
async def test_real_models_find_what_answers_a_question(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics")
    await asyncio.to_thread(build_index, tmp_path / "topics", tmp_path / "index", passage_words=30)
    num_right = 0
    lines: list[str] = []
    source = HybridSource(tmp_path / "index", k=3, reranker="late-interaction", candidates=6, batch_size=3)
    await source.start(lines.append)
    try:
        for number, (_, *sections, question, answer) in enumerate(TOPICS):
            best = (await updates(source, question))[-1].chunks[0]
            num_right += best.uri.startswith(f"{number}.") and sections[answer][1] in best.text
    finally:
        await source.aclose()
    assert num_right >= 9
    assert {"opening the keyword index", "loading the reranker late-interaction", "the index is ready"} <= set(lines)


async def test_many_queries_at_once_get_their_own_answers(built: Path) -> None:
    async with started(built, reranker=BACKWARDS, num_workers=2) as source:
        alone = [(await updates(source, query))[-1].chunks for query in QUERIES]
        together = await asyncio.gather(*(updates(source, query) for query in QUERIES))
        assert [found[-1].chunks for found in together] == alone
        assert [len(pool.process_ids) for pool in pools(source)] == [1, 2]


async def test_a_pipeline_cites_the_reranked_passages_of_a_hybrid_source(built: Path) -> None:
    source = HybridSource(built, k=3, embedder=EMBEDDER, reranker=BACKWARDS)
    titles = [citation.title for citation in await citations(source, QUERIES[0])]
    assert titles == sorted(titles, reverse=True)
    assert len(titles) == 3


# --------------------------------------------------------------------------------------------------- going wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": "5"}, "k='5'"),
        ({"k": 10, "candidates": 9}, "candidates=9 must be at least k=10"),
        ({"candidates": True}, "candidates=True"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": 33}, "num_workers=33"),
        ({"rerank_timeout_s": 0}, "rerank_timeout_s=0"),
        ({"rerank_timeout_s": float("inf")}, "rerank_timeout_s=inf"),
        ({"sentences": 0, "reranker": BACKWARDS}, "sentences=0"),
        ({"sentences": 3}, "name one"),
        ({"vectors": "VectorSource"}, "is no source"),
        ({"vectors": ScriptedSource}, "is no source"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridSource("index", **options)


async def test_a_source_that_is_not_started_says_so(built: Path) -> None:
    await must_be_started(HybridSource(built, embedder=EMBEDDER))


async def test_an_index_without_keywords_is_damaged(index: Path) -> None:
    (index / "keywords.sqlite").unlink()
    manifest = json.loads((index / "manifest.json").read_text())
    del manifest["files"]["keywords.sqlite"]
    (index / "manifest.json").write_text(json.dumps(manifest))
    assert looks_like_index(index)
    with pytest.raises(IndexCorruptError, match=r"does not name keywords\.sqlite\. .*streamrag index build FOLDER"):
        await HybridSource(index, embedder=EMBEDDER).start(lambda line: None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reranker": "/no/such/model"}, ConfigurationError, "no such folder"),
        ({"reranker": "toy_reranker:failing"}, ConfigurationError, "failed: LookupError: no scores today"),
        ({"reranker": "toy_reranker:none", "num_workers": 2}, ConfigurationError, "cannot be loaded: AttributeError"),
        ({"reranker": "late-interaction"}, ConfigurationError, "is a function, which gives none"),
        ({"embedder": "toy_embedder:other"}, IndexMismatchError, "were not made with"),
        ({"embedder": None, "reranker": BACKWARDS}, IndexMismatchError, "nothing is loaded because a file names it"),
    ],
)
async def test_an_unusable_reranker_or_embedder_is_an_error_of_start(
    built: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await HybridSource(built, **{"embedder": EMBEDDER} | options).start(lambda line: None)


@pytest.mark.parametrize("option", ["reranker", "embedder"])
def test_a_model_that_cannot_be_is_refused_at_once(option: str, tmp_path: Path) -> None:
    for name in ("", "./nowhere", "late interaction", "a/b/c"):
        with pytest.raises(ConfigurationError, match=rf"{option}={name!r}: .*Name .*, or module:function"):
            HybridSource(tmp_path, **{option: name})  # type: ignore[arg-type]


async def test_a_missing_index_and_a_damaged_one_are_errors_of_start(index: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexMissingError, match="streamrag index build"):
        await HybridSource(tmp_path / "none").start(lambda line: None)
    (index / "keywords.sqlite").write_bytes(b"happy families")
    with pytest.raises(IndexCorruptError, match=r"keywords\.sqlite has 14 bytes"):
        await HybridSource(index, embedder=EMBEDDER).start(lambda line: None)


async def test_a_missing_stemmer_is_named_with_its_install_line(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[embed\]'"):
        await HybridSource(built, embedder=EMBEDDER).start(lambda line: None)


@pytest.mark.parametrize("what", ["dies", "fails"])
async def test_a_reranker_that_fails_leaves_what_was_found(
    built: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(built, reranker=BACKWARDS, batch_size=4, k=4) as source:
        *found, last = await events_of(source, f"{QUERIES[0]} rerank {what}")
        assert {type(event) for event in found} == {Update}
        assert last == CutShort("reranking, after 1 of 5 batches, failed")  # what a worker says is for the log
        expected = {"dies": "died with exit code 9", "fails": "LookupError: not that"}[what]
        assert expected in caplog.text
        assert len((await updates(source, QUERIES[1]))[-1].chunks) == 4


async def test_updates_may_be_narrowed_to_sentences(built: Path) -> None:
    """A document here is one line, so what is best of its sentences is the document."""
    async with started(built, reranker=BACKWARDS, k=4, sentences=2) as source:
        *_, whole = await updates(source, QUERIES[0])
        assert len(whole.chunks) == 2
        by_score = sorted(whole.chunks, key=lambda chunk: -text_score(f"{chunk.title}\n{chunk.text}"))
        assert list(whole.chunks) == by_score
        *found, last = await events_of(source, f"{QUERIES[0]} at once rerank dies")
        assert found
        assert isinstance(last, CutShort)
        assert last.reason.startswith("finding the best sentences failed; reranking, after 0 of 5 batches, failed")
        assert len((await updates(source, QUERIES[1]))[-1].chunks) == 2


async def test_reranking_that_takes_too_long_is_cut_short_and_its_worker_freed(built: Path, tmp_path: Path) -> None:
    async with started(built, reranker=BACKWARDS, rerank_timeout_s=3) as source:
        *found, last = await events_of(source, f"{QUERIES[0]} at once rerank waits {tmp_path}/never")
        assert found
        assert last == CutShort("reranking, after 0 of 5 batches, took too long")
        assert [pool.num_busy for pool in pools(source)] == [0, 0]
        process_id = int((tmp_path / "never.waiting").read_text())
        await until(lambda: not alive(process_id))


async def test_a_reranker_loads_again_though_queries_run_out_of_time_meanwhile(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model takes longer to load than a query has for reranking."""
    (tmp_path / "slow_reranker.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from toy_reranker import backwards as rerank\n"
        f"while not Path({str(tmp_path / 'may load')!r}).exists(): time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "may load").touch()
    async with started(built, reranker="slow_reranker:rerank", rerank_timeout_s=0.3) as source:
        reranker = pools(source)[1]
        (tmp_path / "may load").unlink()
        for query in (f"{QUERIES[0]} at once rerank dies", QUERIES[0], QUERIES[0]):
            assert isinstance((await events_of(source, query))[-1], CutShort)
        await until(lambda: reranker.process_ids)
        before = reranker.process_ids
        assert isinstance((await events_of(source, QUERIES[0]))[-1], CutShort)
        assert reranker.process_ids == before
        (tmp_path / "may load").touch()
        assert source._opened
        assert source._opened.reranker
        assert source._opened.reranker.loading
        await source._opened.reranker.loading
        assert reranker.process_ids == before


async def test_a_vector_search_that_fails_leaves_the_keywords(built: Path) -> None:
    async with started(built, reranker=BACKWARDS, k=3) as source:
        *found, last = await events_of(source, f"{QUERIES[0]} die now")
        assert len(found) >= 2  # keywords, then reranked
        assert last == CutShort("the vector search failed")


async def test_a_keyword_search_that_fails_leaves_the_vectors(index: Path) -> None:
    async with started(index, k=3) as source:
        (worker,) = pools(source)[0].process_ids
        before = [uris(update) for update in await updates(source, QUERIES[0])]
        (index / "manifest.json").write_text("{}")  # what a worker that takes the place of another would notice
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not alive(worker))
        update, last = await events_of(source, QUERIES[0])
        assert last == CutShort("the keyword search failed")  # its worker died, or one that came noticed the change
        assert set(uris(update)) & set(before[-1])


async def test_a_failure_is_raised_if_no_passage_is_found(built: Path) -> None:
    async with started(built, vectors=ScriptedSource([SourceError("the database is gone")])) as source:
        with pytest.raises(SourceError, match="the database is gone"):
            await updates(source, "zebra")
    async with started(built, vectors=ScriptedSource([])) as source:
        assert await updates(source, "zebra") == []


async def test_a_mistake_of_the_program_is_raised(built: Path) -> None:
    async with started(built, vectors=ScriptedSource([ConfigurationError("no such table")])) as source:
        with pytest.raises(ConfigurationError, match="no such table"):
            await updates(source, QUERIES[0])


@pytest.mark.parametrize("stage", ["wait until", "at once rerank waits"])
async def test_cancelling_at_any_stage_frees_its_worker(built: Path, tmp_path: Path, stage: str) -> None:
    waiting = tmp_path / "never.waiting"
    async with started(built, reranker=BACKWARDS) as source:
        task = asyncio.create_task(events_of(source, f"{QUERIES[0]} {stage} {tmp_path}/never"))
        await until(lambda: waiting.exists() and waiting.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [pool.num_busy for pool in pools(source)] == [0, 0]
        await until(lambda: not alive(int(waiting.read_text())))
        assert await updates(source, QUERIES[0])


async def test_cancelling_at_any_step_of_the_loop_leaves_nothing(built: Path) -> None:
    async with started(built, reranker=BACKWARDS) as source:
        for num_steps in range(0, 60, 3):
            task = asyncio.create_task(events_of(source, QUERIES[0]))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert await updates(source, QUERIES[0])


async def test_leaving_after_the_first_update_leaves_nothing_busy(built: Path) -> None:
    async with started(built, reranker=BACKWARDS) as source:
        async with aclosing(source.stream(QUERIES[0])) as events:
            async for _ in events:
                break
        assert [pool.num_busy for pool in pools(source)] == [0, 0]


@pytest.mark.parametrize("stage", ["wait until", "at once rerank waits"])
async def test_closing_ends_a_search_that_is_under_way_with_an_error(built: Path, tmp_path: Path, stage: str) -> None:
    waiting = tmp_path / "never.waiting"
    async with started(built, reranker=BACKWARDS) as source:
        task = asyncio.create_task(events_of(source, f"{QUERIES[0]} {stage} {tmp_path}/never"))
        await until(lambda: waiting.exists() and waiting.read_text())
        await source.aclose()
        with pytest.raises(WorkerError, match="closed"):
            await task
    assert not alive(int(waiting.read_text()))


async def test_cancelling_the_start_leaves_no_worker(built: Path) -> None:
    for line in ("opening the keyword index", "loading the embedder", f"loading the reranker {BACKWARDS}"):
        source = HybridSource(built, embedder=EMBEDDER, reranker=BACKWARDS)
        reached = asyncio.Event()
        task = asyncio.create_task(
            source.start(lambda told, line=line, reached=reached: reached.set() if told.startswith(line) else None)
        )
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_index_that_is_replaced_serves_on(index: Path, tmp_path: Path) -> None:
    async with started(index, reranker=BACKWARDS) as source:
        before = [update.chunks for update in await updates(source, QUERIES[0])]
        documents = write_documents(tmp_path / "documents", 30, seed=1)
        await asyncio.to_thread(build_index, documents, index, embedder=EMBEDDER, force=True)
        assert [update.chunks for update in await updates(source, QUERIES[0])] == before


@pytest.mark.parametrize("kind", ["diskann", "ivf"])
async def test_both_kinds_of_index_find_added_documents_and_forget_removed_ones(tmp_path: Path, kind: str) -> None:
    documents, index = write_documents(tmp_path / "documents", 40), tmp_path / "index"
    await asyncio.to_thread(build_index, documents, index, embedder=EMBEDDER, kind=kind)
    (documents / "new.txt").write_text("zymurgy w1 w2")
    added = documents / "new.txt"
    await asyncio.to_thread(add_documents, index, [added], folder=documents, embedder=EMBEDDER)
    async with started(index, k=3, candidates=10) as source:
        first, *_, last = await updates(source, "zymurgy")
    assert uris(first) == ["new.txt"]
    assert uris(last)[0] == "new.txt"
    await asyncio.to_thread(remove_documents, index, ["new.txt"], embedder=EMBEDDER)
    async with started(index, k=3, candidates=10) as source:
        found = await updates(source, "zymurgy")
    assert all("new.txt" not in uris(update) for update in found)


async def test_hints_never_grow_over_an_ivf_index(tmp_path: Path) -> None:
    documents, index = write_documents(tmp_path / "documents", 200), tmp_path / "index"
    await asyncio.to_thread(build_index, documents, index, embedder=EMBEDDER, kind="ivf")
    async with started(index, reranker=BACKWARDS, k=5, candidates=20, batch_size=4) as source:
        for query in QUERIES:
            left = [update.hint.num_chunks for update in await updates(source, query) if update.hint]
            assert None not in left
            assert left == sorted(left, reverse=True), query
