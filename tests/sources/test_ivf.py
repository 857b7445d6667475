import asyncio
import shutil
from contextlib import AbstractAsyncContextManager, aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from source_helpers import alive, citations, running, stages_left, until, updates, workers_of
from toy_corpus import EMBEDDER, QUERIES, exact_ranking, resign, write_documents

from streamrag.core import Hint, Update
from streamrag.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    MissingDependencyError,
    SourceError,
    WorkerError,
)
from streamrag.sources.index.build import build_index
from streamrag.sources.index.index_folder import check_index
from streamrag.sources.search.vector import IvfSource, VectorSource, index_source

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

NUM_DOCUMENTS = 600


def build_ivf(folder: Path, num_documents: int) -> Path:
    documents = write_documents(folder / "documents", num_documents)
    build_index(documents, folder / "index", embedder=EMBEDDER, kind="ivf")
    return folder / "index"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that nobody changes, of 24 lists."""
    return build_ivf(tmp_path_factory.mktemp("built"), NUM_DOCUMENTS)


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """An index to damage or replace."""
    return Path(shutil.copytree(built, tmp_path / "index"))


def started(index: Path, **options: Any) -> AbstractAsyncContextManager[IvfSource]:
    return running(IvfSource(index, **{"k": 5, "embedder": EMBEDDER} | options))


async def test_with_every_list_looked_at_the_result_is_that_of_exact_search(built: Path) -> None:
    async with started(built, exact=True, probes=(1, 2, 4, 8)) as source:
        for query in QUERIES:
            found = await updates(source, query)
            assert [(chunk.uri, pytest.approx(chunk.score, abs=1e-5)) for chunk in found[-1].chunks] == exact_ranking(
                built, query
            )[:5]
            for before, after in pairwise(found):  # what is found only gets better
                scores = zip(before.chunks, after.chunks, strict=True)
                assert all((a.score or 0) <= (b.score or 0) for a, b in scores)


async def test_stages_look_at_disjoint_lists_and_together_at_all(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage alone finds the nearest in its own lists: no passage is found by two of them."""
    async with started(built, k=NUM_DOCUMENTS) as source:
        workers = workers_of(source)
        job = {"do": "search", "query": QUERIES[0], "k": 1, "nearer_than": None}
        found: list[int] = []
        for after, until_list in pairwise([0, 1, 5, 12, 24]):
            answer = await workers.run({**job, "k": NUM_DOCUMENTS, "after": after, "until": until_list})
            found += answer["ids"]
            if after == 0:  # as many lists as hold k, which is all of them
                assert sorted(found) == list(range(NUM_DOCUMENTS))
        assert len(found) == NUM_DOCUMENTS
        found = []
        for after, until_list in pairwise([0, 1, 2, 5, 12, 24]):
            answer = await workers.run({**job, "k": 40, "after": after, "until": until_list})
            found += answer["ids"]
        assert len(found) == len(set(found))


async def test_each_update_brings_something_new_and_says_how_many_stages_are_left(built: Path) -> None:
    num_updates = []
    async with started(built, probes=(1, 2, 4, 8, 24)) as source:
        for query in QUERIES:
            found = await updates(source, query)
            assert stages_left(found)[0] == 4
            assert {len(set(update.chunks)) for update in found} == {5}
            num_updates.append(len(found))
    assert max(num_updates) > 1


async def test_stages_end_with_the_last_list(built: Path) -> None:
    async with started(built, probes=(4, 16, 64, 256)) as source:
        assert (await updates(source, QUERIES[0]))[0].hint == Hint(num_chunks=2)
    async with started(built, probes=(4,), exact=True) as source:
        assert (await updates(source, QUERIES[0]))[0].hint == Hint(num_chunks=1)


@pytest.mark.parametrize("num_documents", [1, 2, 6])
def test_an_index_of_fewer_passages_than_asked_for_gives_them_all(tmp_path: Path, num_documents: int) -> None:
    index = build_ivf(tmp_path, num_documents)

    async def search() -> list[Update]:
        async with started(index, k=10, probes=(1,)) as source:
            return await updates(source, QUERIES[0])

    found = asyncio.run(search())
    assert [chunk.uri for chunk in found[-1].chunks] == [name for name, _ in exact_ranking(index, QUERIES[0])]


async def test_many_queries_at_once_get_their_own_answers(built: Path) -> None:
    async with started(built, num_workers=2) as source:
        alone = [(await updates(source, query))[-1] for query in QUERIES]
        together = await asyncio.gather(*(updates(source, query) for query in QUERIES))
        assert [found[-1] for found in together] == alone


async def test_a_lone_surrogate_in_a_query_counts_as_an_unknown_character(built: Path) -> None:
    async with started(built) as source:
        assert await updates(source, "w1 \ud800 w2") == await updates(source, "w1 \ufffd w2")


async def test_an_index_of_either_kind_gets_its_source(built: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "documents", 3)
    await asyncio.to_thread(build_index, tmp_path / "documents", tmp_path / "graph", embedder=EMBEDDER, kind="diskann")
    source = index_source(built, embedder=EMBEDDER)
    assert isinstance(source, IvfSource)
    assert isinstance(index_source(tmp_path / "graph"), VectorSource)
    with pytest.raises(IndexMismatchError, match="index of kind 'ivf': use IvfSource"):
        await VectorSource(built, embedder=EMBEDDER).start(lambda line: None)
    with pytest.raises(IndexMismatchError, match="index of kind 'diskann': use VectorSource"):
        await IvfSource(tmp_path / "graph", embedder=EMBEDDER).start(lambda line: None)
    assert len(await citations(source, QUERIES[0])) == 10


def test_without_diskann_an_ivf_index_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = lambda name: None if name == "diskannpy" else object()  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    documents = write_documents(tmp_path / "documents", 3)
    assert build_index(documents, tmp_path / "index", embedder=EMBEDDER).kind == "ivf"
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps diskannpy.*--kind ivf"):
        build_index(documents, tmp_path / "other", embedder=EMBEDDER, kind="diskann")
    with pytest.raises(ConfigurationError, match="kind='hnsw'"):
        build_index(documents, tmp_path / "other", embedder=EMBEDDER, kind="hnsw")  # type: ignore[arg-type]


def test_without_any_index_library_the_one_for_every_platform_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = lambda name: None if name in ("diskannpy", "faiss") else object()  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(MissingDependencyError, match=r"faiss-cpu is not installed.*pip install '\.\[embed\]'"):
        build_index(write_documents(tmp_path / "documents", 3), tmp_path / "index", embedder=EMBEDDER)


# --------------------------------------------------------------------------------------------------- going wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"probes": ()}, r"probes=\(\)"),
        ({"probes": 4}, "probes=4"),
        ({"probes": (0, 4)}, r"probes\[0\]=0 must be greater"),
        ({"probes": (4, 4)}, "must be growing"),
        ({"probes": (4, 1 << 15)}, "at most"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        IvfSource("index", **options)


async def test_a_missing_package_is_named_with_its_install_line(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"faiss-cpu .*pip install '\.\[embed\]'"):
        await IvfSource(built, embedder=EMBEDDER).start(lambda line: None)


def write_other(path: Path, make: str) -> None:
    import faiss
    import numpy as np

    vectors = np.random.default_rng(0).standard_normal((NUM_DOCUMENTS, 64)).astype(np.float32)
    quantizer = faiss.IndexFlatL2(64)
    if make == "another kind":
        index = quantizer
    else:
        metric = faiss.METRIC_INNER_PRODUCT if make == "another metric" else faiss.METRIC_L2
        index = faiss.IndexIVFFlat(quantizer, 64, 20 if make == "other lists" else 24, metric)
        index.train(vectors)
    if make == "ids that are not there":
        index.add_with_ids(vectors, np.arange(NUM_DOCUMENTS) + (1 << 40))
    elif make == "ids that repeat":
        index.add_with_ids(vectors, np.zeros(NUM_DOCUMENTS, np.int64))
    elif make == "vectors that are none":
        index.add_with_ids(vectors, np.arange(NUM_DOCUMENTS))
        for number in range(24):
            size = index.invlists.list_size(number)
            codes = np.full(size * 64, np.nan, np.float32).view(np.uint8)
            index.invlists.update_entries(number, 0, size, index.invlists.get_ids(number), faiss.swig_ptr(codes))
    elif make != "too few":
        index.add(vectors)
    faiss.write_index(index, str(path))


@pytest.mark.parametrize(
    "make",
    [
        "another kind",
        "another metric",
        "other lists",
        "too few",
        "ids that are not there",
        "ids that repeat",
        "vectors that are none",
        "nonsense",
        "a billion lists",
        "cut short",
    ],
)
async def test_a_file_that_is_not_ours_is_corrupt(index: Path, make: str) -> None:
    """A stranger's index, with a manifest that agrees with its files."""
    path = index / "ivf.index"
    if make == "nonsense":
        path.write_bytes(bytes(range(256)) * 100)
    elif make == "a billion lists":
        data = bytearray(path.read_bytes())
        place = data.index(b"ilar") + 4
        data[place : place + 8] = (1 << 30).to_bytes(8, "little")
        path.write_bytes(data)
    elif make == "cut short":
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        write_other(path, make)
    resign(index)
    with pytest.raises((IndexCorruptError, SourceError), match="is damaged"):
        async with started(index) as source:
            await updates(source, QUERIES[0])


async def test_a_manifest_without_lists_is_corrupt(index: Path) -> None:
    resign(index, num_lists=None)
    with pytest.raises(IndexCorruptError, match="does not say how many lists"):
        check_index(index)
    resign(index, num_lists=25)
    with pytest.raises(IndexCorruptError, match="holds no 25 lists"):
        await IvfSource(index, embedder=EMBEDDER).start(lambda line: None)
    resign(index, num_lists=1 << 15)  # what faiss may take in memory grows with them
    with pytest.raises(IndexCorruptError, match="damaged at num_lists"):
        check_index(index)


async def test_cancelling_a_search_frees_its_worker(built: Path, tmp_path: Path) -> None:
    waiting = tmp_path / "never.waiting"
    async with started(built) as source:
        task = asyncio.create_task(updates(source, f"wait until {tmp_path}/never"))
        await until(lambda: waiting.exists() and waiting.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert workers_of(source).num_busy == 0
        await until(lambda: not alive(int(waiting.read_text())))
        assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5
        async with aclosing(source.stream(QUERIES[0])) as events:
            async for _ in events:
                break
        assert workers_of(source).num_busy == 0


async def test_an_index_that_is_replaced_serves_until_its_worker_must_open_it_again(
    index: Path, tmp_path: Path
) -> None:
    async with started(index) as source:
        before = await updates(source, QUERIES[0])
        documents = write_documents(tmp_path / "documents", 30, seed=1)
        await asyncio.to_thread(build_index, documents, index, embedder=EMBEDDER, force=True, kind="ivf")
        assert await updates(source, QUERIES[0]) == before
        with pytest.raises(WorkerError, match="died"):
            await updates(source, "die now")
        with pytest.raises(SourceError, match="was replaced while it was in use"):
            await updates(source, QUERIES[0])
