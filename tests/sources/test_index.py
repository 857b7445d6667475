import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from source_helpers import alive
from toy_corpus import EMBEDDER, build_toy_index, contents, write_documents

from streamrag.cli import main
from streamrag.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexExistsError,
    IndexMismatchError,
    IndexMissingError,
    MissingDependencyError,
    VectorIndexError,
    WorkerError,
)
from streamrag.sources.index import index_folder
from streamrag.sources.index.build import build_index
from streamrag.sources.index.embedder import find_embedder
from streamrag.sources.index.index_folder import check_index, looks_like_index
from streamrag.support.temp_dirs import locked_folder


@pytest.fixture
def index(toy_index: Callable[[int], Path], tmp_path: Path) -> Path:
    """An index to damage or replace."""
    return Path(shutil.copytree(toy_index(20), tmp_path / "index"))


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """131 documents, and beside them what a build left that died at the last of them. Nobody changes this folder."""
    folder = tmp_path_factory.mktemp("died")
    documents = write_documents(folder / "documents", 130)
    (documents / "last.txt").write_text("die now")
    with pytest.raises(WorkerError):
        build_index(documents, folder / "index", embedder=EMBEDDER, kind="ivf")
    (documents / "last.txt").write_text("live")
    return folder


@pytest.fixture(scope="module")
def undamaged(died: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The index file of the same documents, built in one go."""
    new = tmp_path_factory.mktemp("undamaged") / "new"
    assert build_index(died / "documents", new, embedder=EMBEDDER, kind="ivf").num_embedded == 131
    return (new / "ivf.index").read_bytes()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------- building


def test_an_index_is_built_from_a_folder_and_summed_up(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents", 5)
    (documents / "page.html").write_text("<title>A page</title><h1>Cats</h1><p>purr</p>")
    (documents / "sub").mkdir()
    (documents / "sub" / "page.md").write_text("# Dogs\n\nbark\n")
    (documents / "copy.txt").write_text((documents / "0000.txt").read_text())
    (documents / "image.png").write_bytes(b"\x89PNG")
    (documents / "binary.txt").write_bytes(b"\0")
    steps: list[tuple[int, int, str]] = []
    out = tmp_path / "made" / "here"
    summary = build_index(documents, out, embedder=EMBEDDER, on_progress=lambda *step: steps.append(step))
    assert (summary.num_documents, summary.num_passages, summary.num_duplicates, summary.dimension) == (8, 7, 1, 64)
    assert summary.skipped == (("binary.txt", "binary"), ("image.png", "not text, Markdown, HTML or PDF by its name"))
    assert summary.duration_s > 0
    assert summary.size_bytes == sum(len(body) for name, body in contents(out).items() if name != "manifest.json")
    stored = [json.loads(line) for line in (out / "passages.jsonl").read_text().splitlines()]
    assert stored[-2:] == [
        {"uri": "page.html", "title": "A page", "passage": 0, "text": "Cats\n\npurr"},
        {"uri": "sub/page.md", "title": "Dogs", "passage": 0, "text": "bark"},
    ]
    assert steps[:2] == [(0, 9, "reading"), (1, 9, "reading")]
    assert steps[-5:] == [
        (9, 9, "reading"),
        (0, 7, "embedding"),
        (7, 7, "embedding"),
        (0, 7, "indexing"),
        (7, 7, "indexing"),
    ]
    assert names(tmp_path / "made") == {"here"}
    manifest, _ = check_index(out)
    assert (manifest.embedder, manifest.dimension, manifest.num_passages) == (EMBEDDER, 64, 7)
    assert manifest.packages["diskannpy"] == "0.7.0"


def test_the_index_may_lie_within_the_documents_and_be_built_again(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents", 3)
    out = documents / "index"
    build_index(documents, out, embedder=EMBEDDER)
    first = (out / "passages.jsonl").read_bytes()
    summary = build_index(documents, out, embedder=EMBEDDER, force=True)
    assert summary.skipped == (("index", "is the index"),)
    assert (out / "passages.jsonl").read_bytes() == first


def test_an_empty_folder_may_become_the_index(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    assert check_index(build_toy_index(tmp_path, 2))[0].num_passages == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedder": "/no/such/model"}, "no such folder"),
        ({"embedder": "no_such_module:embed"}, "cannot be loaded: ModuleNotFoundError"),
        ({"embedder": "toy_embedder:no_such_function"}, "cannot be loaded: AttributeError"),
        ({"embedder": "toy_embedder:failing"}, "failed: LookupError: no embeddings today"),
        ({"embedder": "toy_embedder:flat"}, r"array of shape \(64,\)"),
        ({"embedder": "toy_embedder:zeros"}, "vector of zeros"),
        ({"embedder": "toy_embedder:growing"}, "gave 65 dimensions, and 64 before"),
        ({"passage_words": 5}, "passage_words=5"),
        ({"max_file_bytes": 0}, "max_file_bytes=0"),
        ({"max_file_bytes": 1}, "skipped: 3 [0-9]* bytes, more than 1"),
    ],
)
def test_values_that_cannot_work_are_refused_and_leave_nothing(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    write_documents(tmp_path / "documents", 3)
    for path in (tmp_path / "documents").iterdir():
        path.write_text((path.read_text() * 10)[:60] + path.stem)  # of one size, for the last case
    with pytest.raises(ConfigurationError, match=message):
        build_index(tmp_path / "documents", tmp_path / "index", **{"embedder": EMBEDDER} | options)  # type: ignore[arg-type]
    assert names(tmp_path) == {"documents"}


def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    with pytest.raises(ConfigurationError, match=r"documents holds no text, Markdown, HTML or PDF .* nothing"):
        build_index(tmp_path / "documents", tmp_path / "index", embedder=EMBEDDER)
    with pytest.raises(ConfigurationError, match="missing is not a folder"):
        build_index(tmp_path / "missing", tmp_path / "index", embedder=EMBEDDER)
    assert names(tmp_path) == {"documents"}


@pytest.mark.parametrize("package", ["diskannpy", "sentence_transformers", "numpy"])
def test_a_missing_package_is_named_with_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def find_spec(name: str) -> object:
        return None if name == package else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(MissingDependencyError, match="pip install"):
        build_index(tmp_path, tmp_path / "index", kind="diskann")


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VectorIndexError, match=r"index failed: .*File exists"):
        build_index(write_documents(tmp_path / "documents", 2), tmp_path / "file" / "index", embedder=EMBEDDER)


async def test_building_on_an_event_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread"):
        build_index(tmp_path, tmp_path / "index")


async def test_an_index_is_built_in_a_thread(tmp_path: Path) -> None:
    out = await asyncio.to_thread(build_toy_index, tmp_path, 2)
    assert check_index(out)[0].num_passages == 2


def test_embedders_are_found_by_name_path_and_function(tmp_path: Path) -> None:
    packaged = find_embedder("all-MiniLM-L6-v2")
    assert Path(packaged.location, "model.safetensors").exists()
    assert packaged == find_embedder("sentence-transformers/all-MiniLM-L6-v2")
    assert packaged.env["HF_HUB_OFFLINE"] == "1"
    at_path = find_embedder(str(tmp_path))
    assert (at_path.name, at_path.location, at_path.env["HF_HUB_OFFLINE"]) == (str(tmp_path), str(tmp_path), "1")
    assert find_embedder("a.b:c").location == "a.b:c"
    assert "HF_HUB_OFFLINE" not in find_embedder("someone/some-model").env


# ----------------------------------------------------------------------------------------- what is there already


def test_an_index_is_replaced_only_by_force(index: Path, tmp_path: Path) -> None:
    before = contents(index)
    documents = write_documents(tmp_path / "documents", 4, seed=1)
    with pytest.raises(IndexExistsError, match="--force"):
        build_index(documents, index, embedder=EMBEDDER)
    assert contents(index) == before
    build_index(documents, index, embedder=EMBEDDER, force=True)
    assert check_index(index)[0].num_passages == 4
    assert names(tmp_path) == {"documents", "index"}


@pytest.mark.parametrize("is_file", [True, False])
def test_a_path_that_is_no_index_is_never_replaced(index: Path, tmp_path: Path, is_file: bool) -> None:
    out = tmp_path / "precious" if is_file else index
    (out if is_file else out / "thesis.txt").write_text("ten years of work")
    before = contents(tmp_path)
    with pytest.raises(IndexExistsError, match="not a vector index"):
        build_index(write_documents(tmp_path / "documents", 2), out, embedder=EMBEDDER, force=True)
    assert {name: body for name, body in contents(tmp_path).items() if "documents" not in name} == before


def only_a_manifest(index: Path) -> None:
    for path in index.iterdir():
        path.unlink()
    (index / "manifest.json").write_text('{"name": "a browser extension"}')


def without_a_manifest(index: Path) -> None:
    (index / "manifest.json").unlink()
    (index / "passages.jsonl").unlink()


def only_what_others_write_too(index: Path) -> None:
    for path in index.glob("ann_*"):
        path.unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: (index / "ann_karenina.txt").write_text("happy families"),
        lambda index: (index / "ann_thesis").mkdir(),
        lambda index: lead_elsewhere(index / "passages.jsonl"),
        lambda index: become_a_pipe(index / "passages.jsonl"),
        only_a_manifest,
        only_what_others_write_too,
        without_a_manifest,
    ],
)
def test_a_folder_with_anything_else_in_it_is_no_index(index: Path, change: Callable[[Path], object]) -> None:
    assert looks_like_index(index)
    change(index)
    assert not looks_like_index(index)


def test_an_index_that_appears_meanwhile_is_not_replaced(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def somebody_else(done: int, total: int, step: str) -> None:
        if step == "indexing" and not out.exists():
            shutil.copytree(index, out)

    with pytest.raises(IndexExistsError):
        build_index(write_documents(tmp_path / "documents", 2), out, embedder=EMBEDDER, on_progress=somebody_else)
    assert contents(out) == contents(index)
    assert names(tmp_path) == {"documents", "index", "out"}


def kept_folders(folder: Path) -> list[set[str]]:
    return [names(path) for path in folder.iterdir() if ".building-" in path.name]


@pytest.mark.parametrize("kind", ["diskann", "ivf"])
def test_a_file_that_cannot_be_written_is_told_and_nothing_is_embedded_again(
    tmp_path: Path, kind: Literal["diskann", "ivf"]
) -> None:
    """Of an error in the midst of writing, DiskANN ends its process."""
    pytest.importorskip({"diskann": "diskannpy", "ivf": "faiss"}[kind])
    documents = write_documents(tmp_path / "documents", 600)
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_bytes = 155_000  # the vectors have 153,600, what comes of them more
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, no_limit[1]))
    try:
        with pytest.raises(VectorIndexError, match=r"(?s)building the index .*failed: .*Is there room for its files?"):
            build_index(documents, tmp_path / "index", embedder=EMBEDDER, kind=kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert build_index(documents, tmp_path / "index", embedder=EMBEDDER, kind=kind).num_embedded == 0


def test_a_worker_that_dies_midway_leaves_the_old_index_and_what_it_embedded(index: Path, tmp_path: Path) -> None:
    before = contents(index)
    documents = write_documents(tmp_path / "documents", 130)
    (documents / "last.txt").write_text("die now")  # in the second batch
    with pytest.raises(WorkerError, match=r"index building worker .* died with exit code 9"):
        build_index(documents, index, embedder=EMBEDDER, force=True)
    assert contents(index) == before
    assert kept_folders(tmp_path) == [{"embedded.json", "embedded.keys", "embedded.f32"}]
    (documents / "last.txt").write_text("live")
    assert build_index(documents, index, embedder=EMBEDDER, force=True).num_embedded == 3
    assert names(tmp_path) == {"documents", "index"}


def test_embeddings_of_another_embedder_are_not_used_again(died: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(died, tmp_path / "died"))
    summary = build_index(folder / "documents", folder / "index", embedder="toy_embedder:other", kind="ivf")
    assert (summary.num_embedded, summary.num_passages) == (131, 131)
    assert names(folder) == {"documents", "index"}


@pytest.mark.parametrize(
    ("damage", "num_embedded"),
    [
        (lambda kept: os.truncate(kept / "embedded.f32", 100 * 256 + 7), 31),
        (lambda kept: os.truncate(kept / "embedded.keys", 100 * 16 + 7), 31),
        (lambda kept: (kept / "embedded.json").write_text("[" * 100_000), 131),
        (lambda kept: (kept / "embedded.f32").write_bytes(bytes(128 * 256)), 131),
        (lambda kept: lead_elsewhere(kept / "embedded.f32"), 131),
    ],
)
def test_only_the_undamaged_embeddings_are_used_again(
    died: Path, undamaged: bytes, tmp_path: Path, damage: Callable[[Path], object], num_embedded: int
) -> None:
    folder = Path(shutil.copytree(died, tmp_path / "died"))
    (kept,) = (path for path in folder.iterdir() if ".building-" in path.name)
    damage(kept)
    again = build_index(folder / "documents", folder / "index", embedder=EMBEDDER, kind="ivf")
    assert again.num_embedded == num_embedded
    assert (folder / "index" / "ivf.index").read_bytes() == undamaged


def interrupt(code: str, waiting: Path) -> bytes:
    """Run a program, interrupt it once its embedder has written its process id to `waiting`, and return its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as process:
        bound = threading.Timer(60, process.kill)
        bound.start()
        while not (waiting.exists() and waiting.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
        bound.cancel()
    assert not alive(int(waiting.read_text()))
    return stderr.strip()


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_leaves_the_old_index_and_no_process(index: Path, tmp_path: Path) -> None:
    before = contents(index)
    documents = write_documents(tmp_path / "documents", 2)
    (documents / "slow.txt").write_text(f"wait until {tmp_path}/never")
    code = f"from streamrag.sources.index.build import build_index; build_index(*{(str(documents), str(index))!r}, " + (
        f"embedder={EMBEDDER!r}, force=True)"
    )
    assert interrupt(code, tmp_path / "never.waiting").endswith(b"KeyboardInterrupt")
    assert contents(index) == before
    assert names(tmp_path) == {"documents", "index", "never.waiting"}


@pytest.mark.usefixtures("default_signals")
def test_a_stopped_command_says_that_it_continues_and_then_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = write_documents(tmp_path / "documents", 130)
    (documents / "slow.txt").write_text(f"wait until {tmp_path}/never")  # in the second batch
    command = ["index", "build", str(documents), "--out", str(tmp_path / "index")]
    command += ["--embedder", EMBEDDER, "--kind", "ivf"]
    stderr = interrupt(f"from streamrag.cli import main; main({command!r})", tmp_path / "never.waiting")
    assert stderr.endswith(b"streamrag: stopped. the same command continues: 128 of 131 passages are embedded")
    assert b"continuing" not in stderr
    (documents / "slow.txt").write_text("quick")
    assert main(command) == 0
    written = capsys.readouterr().err
    assert "\ncontinuing: 128 of 131 passages are embedded\n" in written
    assert "faiss IVF; 3 passages were embedded" in written


def test_a_build_removes_the_rest_of_a_killed_build_but_not_a_running_one(index: Path, tmp_path: Path) -> None:
    left, other = tmp_path / ".index.building-0123abcd", tmp_path / ".index.building-thesis"
    with locked_folder(tmp_path, ".index.building-") as others:
        for folder in (left, other):
            folder.mkdir()
            (folder / "passages.jsonl").write_text("")
        build_index(write_documents(tmp_path / "documents", 2), index, embedder=EMBEDDER, force=True)
        assert names(tmp_path) == {"documents", "index", other.name, others.name}
    assert names(tmp_path) == {"documents", "index", other.name}


# -------------------------------------------------------------------------------------------------------- opening


def edit_manifest(index: Path, **fields: object) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flip_a_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lead_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip_a_byte])
@pytest.mark.parametrize(
    "name",
    ["passages.jsonl", "ann_disk.index", "ann_metadata.bin", "ann_pq_compressed.bin", "ann_pq_pivots.bin"],
)
def test_a_file_that_is_not_as_it_was_written_is_corrupt(
    index: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(index / name)
    with pytest.raises(
        IndexCorruptError, match=rf"damaged: {name} .*streamrag index build FOLDER --out \S*index --force"
    ):
        check_index(index)


def test_only_the_size_of_a_large_file_is_checked_unless_all_is_read(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index_folder, "MAX_HASHED_BYTES", 0)
    assert main(["index", "verify", str(index)]) == 0
    printed = capsys.readouterr()
    assert "match their checksums" in printed.out
    assert "reading vectors.f32" in printed.err
    flip_a_byte(index / "vectors.f32")
    check_index(index)
    assert main(["index", "verify", str(index)]) == 1
    assert "vectors.f32 is not as it was written" in capsys.readouterr().err
    truncate(index / "vectors.f32")
    with pytest.raises(IndexCorruptError, match=r"vectors\.f32 has"):
        check_index(index)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: (index / "manifest.json").unlink(), "cannot be read"),
        (lambda index: truncate(index / "manifest.json"), "is damaged"),
        (lambda index: (index / "manifest.json").write_text("[]"), "is damaged"),
        (lambda index: edit_manifest(index, num_passages=-1), "damaged at num_passages"),
        (lambda index: edit_manifest(index, files={}), "does not name ann_disk.index"),
        (
            lambda index: edit_manifest(
                index,
                files={
                    **json.loads((index / "manifest.json").read_text())["files"],
                    "../elsewhere": {"size_bytes": 1, "sha256": ""},
                },
            ),
            "a file elsewhere",
        ),
        (lambda index: lead_elsewhere(index / "passages.jsonl"), r"passages.jsonl cannot be read \(it is a link\)"),
        (
            lambda index: become_a_pipe(index / "passages.jsonl"),
            r"passages.jsonl cannot be read \(it is not ",
        ),
        (lambda index: (index / "manifest.json").write_text("[" * 100_000), "is damaged"),
        (lambda index: (index / "manifest.json").write_text(" " * (17 << 20)), "manifest.json is damaged"),
        (lambda index: edit_manifest(index, probe=[float("inf")]), "is damaged"),
        (lambda index: edit_manifest(index, dimension=10**17), "damaged at dimension"),
        (lambda index: edit_manifest(index, embedder="x" * 2000), "damaged at embedder"),
    ],
)
def test_a_damaged_manifest_is_corrupt(index: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(index)
    with pytest.raises(IndexCorruptError, match=message):
        check_index(index)


def test_a_damaged_index_is_replaced_by_force(index: Path, tmp_path: Path) -> None:
    truncate(index / "manifest.json")
    build_index(write_documents(tmp_path / "documents", 2), index, embedder=EMBEDDER, force=True)
    assert check_index(index)[0].num_passages == 2


@pytest.mark.parametrize("change", [lead_elsewhere, become_a_pipe])
def test_a_manifest_that_is_a_link_or_a_pipe_is_not_read(index: Path, change: Callable[[Path], object]) -> None:
    change(index / "manifest.json")
    with pytest.raises(IndexMissingError, match="is no vector index"):
        check_index(index)


@pytest.mark.parametrize("kind", ["missing", "file", "other folder", "empty folder"])
def test_a_missing_index_is_an_error_that_says_how_to_build_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "index"
    if kind == "file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
    if kind == "other folder":
        (path / "thesis.txt").write_text("")
    places = f"{path} --out {path}-index" if kind == "other folder" else f"FOLDER --out {path}"
    with pytest.raises(IndexMissingError, match=rf"streamrag index build {places}$"):
        check_index(path)


def test_the_error_names_an_index_that_stands_beside_its_documents(index: Path, tmp_path: Path) -> None:
    documents = tmp_path / "handbook"
    write_documents(documents, 1)
    index.rename(tmp_path / "handbook-index")
    with pytest.raises(IndexMissingError, match=rf"{documents} is no vector index\. Did you mean {documents}-index\?$"):
        check_index(documents)


def test_an_index_in_another_format_says_so(index: Path) -> None:
    edit_manifest(index, format_version=3)
    with pytest.raises(IndexMismatchError, match="format version 3, and streamrag reads 2"):
        check_index(index)
