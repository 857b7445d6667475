import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_helpers import running, updates
from toy_corpus import EMBEDDER, contents, exact_ranking, resign, write_documents

from streamrag.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexMissingError,
    VectorIndexError,
    WorkerError,
)
from streamrag.sources.index.build import build_index
from streamrag.sources.index.changes import add_documents, remove_documents
from streamrag.sources.index.diskann import keep_graph
from streamrag.sources.index.index_folder import check_index
from streamrag.sources.search.vector import IvfSource, index_source

KINDS = ["diskann", "ivf"]
QUERY = "w1 w2 w3 w4 w5"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents", 12)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of each kind, of the same documents; nobody changes them."""
    folder = tmp_path_factory.mktemp("built")
    for kind in KINDS:
        build_index(write_documents(folder / "documents", 12), folder / kind, embedder=EMBEDDER, kind=kind)
    return folder


@pytest.fixture(params=KINDS)
def index(request: pytest.FixtureRequest, built: Path, documents: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / request.param, tmp_path / "index"))


@pytest.fixture
def ivf(built: Path, documents: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built / "ivf", tmp_path / "index"))


def stored(index: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (index / "passages.jsonl").read_text().splitlines()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def found(index: Path, query: str = QUERY, k: int = 100) -> list[str]:
    """The documents that a search finds last."""

    async def search() -> list[str]:
        async with running(index_source(index, k=k, embedder=EMBEDDER)) as source:
            return [chunk.uri for chunk in (await updates(source, query))[-1].chunks]

    return asyncio.run(search())


def test_documents_are_added_and_replaced_and_only_they_are_embedded(index: Path, documents: Path) -> None:
    (documents / "0003.txt").write_text("w1 w2 w3 is another text now")
    (documents / "sub").mkdir()
    (documents / "sub" / "new.txt").write_text("w4 w5 is new")
    (documents / "image.png").write_bytes(b"")
    steps: list[str] = []
    paths = [documents / "0003.txt", documents / "sub", documents / "image.png"]
    summary = add_documents(
        index, paths, folder=documents, embedder=EMBEDDER, on_progress=lambda done, total, step: steps.append(step)
    )
    assert (summary.num_documents, summary.num_passages, summary.num_embedded) == (13, 13, 2)
    assert summary.skipped == (("image.png", "not text, Markdown, HTML or PDF by its name"),)
    assert set(steps) == {"reading", "embedding", "indexing"}
    assert names(index.parent) == {"documents", "index"}
    manifest, _ = check_index(index)
    assert (manifest.num_documents, manifest.num_passages, manifest.format_version) == (13, 13, 2)
    expected = [name for name, _ in exact_ranking(index, QUERY)]
    assert {"0003.txt", "sub/new.txt"} == set(expected[:2])
    assert found(index) == expected
    assert [fields["text"] for fields in stored(index) if fields["uri"] == "0003.txt"] == [
        "w1 w2 w3 is another text now"
    ]


def test_an_index_that_was_changed_is_as_one_built_anew(index: Path, documents: Path) -> None:
    (documents / "0003.txt").write_text("other")
    add_documents(index, [documents], embedder=EMBEDDER)
    (documents / "0005.txt").unlink()
    summary = remove_documents(index, ["0005.txt"], embedder=EMBEDDER)
    assert (summary.num_embedded, summary.num_passages) == (0, 11)
    new = index.parent / "new"
    build_index(documents, new, embedder=EMBEDDER, kind=check_index(index)[0].kind)
    assert sorted(map(str, stored(index))) == sorted(map(str, stored(new)))
    assert found(index) == found(new)


def test_a_removed_document_is_gone_and_its_duplicate_takes_its_place(documents: Path, tmp_path: Path) -> None:
    (documents / "a").mkdir()
    (documents / "a" / "one.txt").write_text("the same licence")
    (documents / "a" / "two.txt").write_text("another")
    (documents / "twin.txt").write_text("the same licence")
    index = tmp_path / "index"
    assert build_index(documents, index, embedder=EMBEDDER, kind="ivf").num_duplicates == 1
    summary = remove_documents(index, ["a/", "0000.txt"], embedder=EMBEDDER)
    assert (summary.num_documents, summary.num_passages, summary.num_duplicates) == (12, 12, 0)
    assert summary.num_embedded == 1  # with another title
    assert {fields["uri"] for fields in stored(index)} == {f"{n:04}.txt" for n in range(1, 12)} | {"twin.txt"}
    assert found(index, "the same licence", k=1) == ["twin.txt"]


def test_lists_are_used_again_until_there_are_many_more_passages(ivf: Path, tmp_path: Path) -> None:
    assert check_index(ivf)[0].num_lists == 3
    add_documents(ivf, [write_documents(tmp_path / "more", 16, seed=1)], embedder=EMBEDDER)  # four are replaced
    assert (check_index(ivf)[0].num_lists, check_index(ivf)[0].num_passages) == (3, 16)
    add_documents(ivf, [write_documents(tmp_path / "most", 100, seed=2)], embedder=EMBEDDER)
    assert check_index(ivf)[0].num_lists == 10
    assert found(ivf) == [name for name, _ in exact_ranking(ivf, QUERY)]


GRAPH = "ann_disk.index"


def test_a_graph_is_kept_until_a_tenth_has_changed(tmp_path: Path) -> None:
    documents, index = write_documents(tmp_path / "documents", 200), tmp_path / "index"
    build_index(documents, index, embedder=EMBEDDER, kind="diskann")
    graph = (index / GRAPH).read_bytes()
    (documents / "0003.txt").write_text(QUERY)
    (documents / "new.txt").write_text(f"{QUERY} is new")
    add_documents(index, [documents], embedder=EMBEDDER)
    expected = [name for name, _ in exact_ranking(index, QUERY)]
    assert {"0003.txt", "new.txt"} == set(expected[:2])
    remove_documents(index, expected[2:17], embedder=EMBEDDER)  # more than the first list has
    assert (index / GRAPH).read_bytes() == graph
    assert found(index, k=5) == [*expected[:2], *expected[17:20]]
    assert found(index, k=200) == [*expected[:2], *expected[17:]]
    (documents / "0004.txt").write_text(f"{QUERY} too")
    add_documents(index, [documents / "0004.txt"], embedder=EMBEDDER)  # moves passages once more
    assert (index / GRAPH).read_bytes() == graph
    assert found(index, k=5) == [name for name, _ in exact_ranking(index, QUERY)[:5]]
    add_documents(index, [documents, write_documents(tmp_path / "more" / "more", 20, seed=1).parent], embedder=EMBEDDER)
    assert (index / GRAPH).read_bytes() != graph
    assert not (index / "nodes.i32").exists()
    assert found(index, k=300) == [name for name, _ in exact_ranking(index, QUERY)]


def test_a_graph_whose_files_have_changed_is_not_kept(tmp_path: Path) -> None:
    """Opening an index hashes no files above 64 MiB."""
    documents, index, new = write_documents(tmp_path / "documents", 50), tmp_path / "index", tmp_path / "new"
    build_index(documents, index, embedder=EMBEDDER, kind="diskann")
    manifest, _ = check_index(index)
    nodes = np.arange(50)
    new.mkdir()
    assert keep_graph(index, manifest, new, nodes, 50)
    assert (new / GRAPH).read_bytes() == (index / GRAPH).read_bytes()
    with (index / GRAPH).open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    (new / "nodes.i32").unlink()
    assert not keep_graph(index, manifest, new, nodes, 50)
    (index / GRAPH).unlink()
    assert not keep_graph(index, manifest, new, nodes, 50)
    assert names(new) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda nodes: nodes[:-1],
        lambda nodes: [*nodes[:-1], nodes[1]],
        lambda nodes: [*nodes[:-1], 99],
        lambda nodes: [-2, *nodes[1:]],
    ],
)
def test_nodes_that_are_not_of_the_passages_are_refused(
    change: Callable[[list[int]], list[int]], tmp_path: Path
) -> None:
    documents, index = write_documents(tmp_path / "documents", 30), tmp_path / "index"
    build_index(documents, index, embedder=EMBEDDER, kind="diskann")
    remove_documents(index, ["0000.txt"], embedder=EMBEDDER)
    nodes = np.fromfile(index / "nodes.i32", np.int32).tolist()
    assert nodes == [-1, *range(29)]
    np.array(change(nodes), np.int32).tofile(index / "nodes.i32")
    resign(index)
    with pytest.raises(IndexCorruptError, match=r"nodes\.i32|does not describe"):
        found(index)


async def test_a_source_that_has_the_old_index_open_goes_on_with_it(ivf: Path) -> None:
    async with running(IvfSource(ivf, embedder=EMBEDDER, k=12)) as source:
        before = await updates(source, QUERY)
        await asyncio.to_thread(remove_documents, ivf, ["0003.txt"], embedder=EMBEDDER)
        assert await updates(source, QUERY) == before


# --------------------------------------------------------------------------------------------------- going wrong


def test_a_change_that_cannot_be_made_is_refused_and_changes_nothing(
    index: Path, documents: Path, tmp_path: Path
) -> None:
    before = contents(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        add_documents(index, [tmp_path / "nowhere"], embedder=EMBEDDER)
    with pytest.raises(ConfigurationError, match=r"index-documents|not within"):
        add_documents(index, [documents], folder=tmp_path / "empty", embedder=EMBEDDER)
    with pytest.raises(ConfigurationError, match="holds no text, Markdown, HTML or PDF"):
        add_documents(index, [tmp_path / "empty"], embedder=EMBEDDER)
    with pytest.raises(ConfigurationError, match="has no document '000'"):
        remove_documents(index, ["0001.txt", "000"], embedder=EMBEDDER)
    with pytest.raises(ConfigurationError, match="would be empty"):
        remove_documents(index, [f"{number:04}.txt" for number in range(12)], embedder=EMBEDDER)
    with pytest.raises(IndexMissingError):
        remove_documents(tmp_path / "empty", ["a"], embedder=EMBEDDER)
    with pytest.raises(IndexMismatchError, match="nothing is loaded because a file names it"):
        remove_documents(index, ["0001.txt"])
    with pytest.raises(IndexMismatchError, match="were not made with"):
        remove_documents(index, ["0001.txt"], embedder="toy_embedder:other")
    assert contents(tmp_path) == before
    assert names(tmp_path) == {"documents", "index", "empty"}


async def test_changing_on_an_event_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread\(add_documents"):
        add_documents(tmp_path, [tmp_path])
    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread\(remove_documents"):
        remove_documents(tmp_path, ["a"])


def test_a_change_by_another_program_meanwhile_is_not_lost(index: Path, documents: Path, tmp_path: Path) -> None:
    def somebody_else(done: int, total: int, step: str) -> None:
        if step == "indexing" and not done:
            thread = threading.Thread(
                target=remove_documents, args=[index, ["0007.txt"]], kwargs={"embedder": EMBEDDER}
            )
            thread.start()
            thread.join()

    with pytest.raises(VectorIndexError, match="changed by another program meanwhile"):
        remove_documents(index, ["0001.txt"], embedder=EMBEDDER, on_progress=somebody_else)
    assert {fields["uri"] for fields in stored(index)} == {f"{n:04}.txt" for n in range(12) if n != 7}
    assert names(tmp_path) == {"documents", "index"}


def test_a_worker_that_dies_leaves_the_old_index(index: Path, tmp_path: Path) -> None:
    before = contents(index)
    (tmp_path / "bad.txt").write_text("die now")
    with pytest.raises(WorkerError, match="died with exit code 9"):
        add_documents(index, [tmp_path / "bad.txt"], embedder=EMBEDDER)
    assert contents(index) == before
    assert names(tmp_path) == {"documents", "index", "bad.txt"}


CHANGE = """
import sys
from pathlib import Path
from streamrag.sources.index.changes import add_documents, remove_documents

index, documents, embedder = sys.argv[1:]
print("ready", flush=True)
while True:
    add_documents(index, [documents], embedder=embedder)
    print("changed", flush=True)
    remove_documents(index, ["0000.txt", "0001.txt"], embedder=embedder)
    print("changed", flush=True)
"""


def test_a_program_that_is_killed_leaves_the_old_index_or_the_new_one(
    index: Path, documents: Path, tmp_path: Path
) -> None:
    """`kill -9` at chance moments."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", CHANGE, str(index), str(documents), EMBEDDER]
    chance = random.Random(0)
    for _ in range(2):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=chance.uniform(0.1, 1.5))
            process.send_signal(signal.SIGKILL)
        assert check_index(index)[0].num_passages in (10, 12)
    assert {f"{number:04}.txt" for number in range(2, 12)} <= set(found(index))
    remove_documents(index, ["0002.txt"], embedder=EMBEDDER)
    assert names(tmp_path) == {"documents", "index"}


STEPS = ["passages", "embedding", "indexing", "exchange", "removing the old"]
STOPPED = """
import os, shutil, signal, sys
from streamrag.sources.index import changes, generation

index, step, embedder = sys.argv[1:]

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def at(number, total, name):
    if name == step and number == total:
        die()

if step == "passages":
    generation.write_keywords = die
elif step == "exchange":
    generation.exchange_folders = die
elif step == "removing the old":
    shutil.rmtree = die
changes.remove_documents(index, ["0000.txt"], embedder=embedder, on_progress=at)
"""


@pytest.mark.parametrize("step", STEPS)
def test_a_program_that_is_killed_at_a_step_leaves_a_whole_index(ivf: Path, tmp_path: Path, step: str) -> None:
    before = contents(ivf)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", STOPPED, str(ivf), step, EMBEDDER]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3  # what was left behind
    if step == "removing the old":
        assert check_index(ivf)[0].num_passages == 11
    else:
        assert contents(ivf) == before
    remove_documents(ivf, ["0005.txt"], embedder=EMBEDDER)
    assert names(tmp_path) == {"documents", "index"}
    assert "0005.txt" not in found(ivf)


KILLED = """
import os, signal, sys
from streamrag.sources.index.build import build_index

def at(number, total, name):
    if name == "embedding" and number == 128:
        os.kill(os.getpid(), signal.SIGKILL)

build_index(sys.argv[1], sys.argv[2], embedder=sys.argv[3], kind="ivf", on_progress=at)
"""


def test_a_build_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    documents, index = write_documents(tmp_path / "documents", 140), tmp_path / "index"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", KILLED, str(documents), str(index), EMBEDDER]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert not index.exists()
    steps: list[tuple[int, int, str]] = []
    summary = build_index(documents, index, embedder=EMBEDDER, kind="ivf", on_progress=lambda *step: steps.append(step))
    assert summary.num_embedded == 12
    assert [step for step in steps if step[2] == "embedding"] == [(128, 140, "embedding"), (140, 140, "embedding")]
    assert names(tmp_path) == {"documents", "index"}


def test_a_disk_that_is_full_leaves_the_old_index(documents: Path, tmp_path: Path) -> None:
    """On a file system of 256 KiB, where only root may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        index = disk / "index"
        build_index(documents, index, embedder=EMBEDDER, kind="ivf")
        before = contents(index)
        more = write_documents(tmp_path / "more", 1500, seed=1)
        with pytest.raises(VectorIndexError, match=r"No space left|Is there room"):
            add_documents(index, [more], embedder=EMBEDDER)
        assert contents(index) == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)
