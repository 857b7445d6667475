"""The folder of a vector index: its files, and the checks before they are used.

manifest.json           the parameters of the index, and the size and SHA-256 of the other files
passages.jsonl          one passage a line, in the order of the vectors
duplicates.jsonl        passages left out as duplicates, which are needed when their twin is removed
keywords.sqlite         the keyword index, see `keywords.py`

Kind "diskann":
vectors.f32             the embedder's vectors, for adding and removing documents
nodes.i32               the passage of each node of the graph, -1 for a removed one; without it, they have one order.
                        Passages without a node were added after the graph was built, and are compared one by one
ann_disk.index          DiskANN's graph with the full vectors, read at every search
ann_pq_*.bin            DiskANN's compressed vectors, held in the searcher's memory
ann_metadata.bin        DiskANN's number of vectors, dimension and metric

Kind "ivf":
ivf.index               faiss's inverted lists with the full vectors, mapped into memory and read at every search
"""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from streamrag.errors import IndexCorruptError, IndexMismatchError, IndexMissingError
from streamrag.support.bounded_reading import MAX_LINE_BYTES, MAX_SMALL_FILE_BYTES, open_regular, parse_json

IndexKind: TypeAlias = Literal["diskann", "ivf"]
FORMAT_VERSION: Literal[2] = 2
MANIFEST, PASSAGES, DUPLICATES = "manifest.json", "passages.jsonl", "duplicates.jsonl"
KEYWORDS = "keywords.sqlite"
VECTORS, NODES, IVF = "vectors.f32", "nodes.i32", "ivf.index"
DISKANN = {"ann_disk.index", "ann_metadata.bin", "ann_pq_compressed.bin", "ann_pq_pivots.bin"}
COMMON = {PASSAGES, DUPLICATES, KEYWORDS}
NEEDED: dict[str, set[str]] = {"diskann": COMMON | DISKANN | {VECTORS}, "ivf": COMMON | {IVF}}
"""The files of each kind of index."""
OPTIONAL = {NODES} | {f"ann_disk.index_{name}.bin" for name in ("centroids", "medoids", "max_base_norm")}
"""Other files that an index may have, among them DiskANN's for large indexes and other metrics."""
EMBEDDINGS = ("embedded.json", "embedded.keys", "embedded.f32")
"""Files that stay in a building folder when a build stops: the embedder, the key of each text, the vectors."""
MAX_HASHED_BYTES = 64 << 20
"""Opening an index compares the SHA-256 of files up to this size, and only the size of larger ones."""
OnFile: TypeAlias = Callable[[str, int], None]
"""A callback with a file's name and size in bytes."""
_Count: TypeAlias = Annotated[int, Field(gt=0, lt=1 << 31)]


class FileEntry(BaseModel):
    """The manifest's entry of a file."""

    model_config = ConfigDict(frozen=True)

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """The parameters with which an index was built."""

    model_config = ConfigDict(frozen=True)

    format_version: Literal[2] = FORMAT_VERSION
    kind: IndexKind
    created: datetime
    embedder: Annotated[str, Field(max_length=1000)]
    """Name for people. It is looked up only if it is the default; see `embedder_of_index`."""
    dimension: _Count
    probe: tuple[float, ...]
    """First numbers of a sample vector; see `EmbedderIdentity`."""
    is_normalized: Literal[True] = True
    metric: Literal["l2"] = "l2"
    """The metric. Distances are squared: between unit vectors they are 2 - 2 * cosine similarity."""
    num_documents: _Count
    num_passages: _Count
    passage_words: _Count
    graph_degree: _Count | None = None
    build_complexity: _Count | None = None
    """DiskANN's parameters."""
    num_lists: Annotated[int, Field(gt=0, lt=1 << 15)] | None = None
    """Number of inverted lists of an IVF index, which determines the memory for opening it."""
    packages: dict[str, str]
    """Versions of packages."""
    files: dict[str, FileEntry]


@with_config(ConfigDict(strict=True))
class StoredPassage(TypedDict):
    """The fields of a line of `passages.jsonl`."""

    uri: str
    title: str
    passage: int
    text: str


_STORED = TypeAdapter(StoredPassage)


def looks_like_index(folder: Path) -> bool:
    """Whether replacing this folder is safe: it has only regular files of an index, enough to be one, even damaged."""
    with os.scandir(folder) as entries:
        names = {entry.name if entry.is_file(follow_symlinks=False) else "" for entry in entries}
    if not names <= set().union(OPTIONAL, {MANIFEST}, *NEEDED.values()):
        return False
    # Many programs write a manifest.json or a passages.jsonl: a file of the index library must be there too.
    has_all = any(names >= needed for needed in NEEDED.values())
    return has_all or (MANIFEST in names and not names <= {MANIFEST, VECTORS, NODES} | COMMON)


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Return a manifest entry for each file of a folder."""
    paths = sorted(folder.iterdir())
    return {path.name: FileEntry(size_bytes=path.stat().st_size, sha256=sha256_of(path)) for path in paths}


def check_index(folder: Path, *, on_file: OnFile | None = None) -> tuple[Manifest, str]:
    """Check an index, and return its manifest and the manifest's own SHA-256. Hashes files of up to 64 MiB.

    on_file: called before each file; with it, files of any size are hashed.

    :raises IndexMissingError: there is no index.
    :raises IndexMismatchError: its format is of another version of streamrag.
    :raises IndexCorruptError: its files differ from the manifest.
    """
    path = folder / MANIFEST
    try:
        text = _read_manifest(path)
    except OSError as error:
        if folder.is_dir() and looks_like_index(folder):
            raise corrupt(folder, f"its {MANIFEST} cannot be read ({error.strerror})") from error
        has_documents = isinstance(error, FileNotFoundError) and folder.is_dir() and any(folder.iterdir())
        build = f"build {folder} --out {folder}-index" if has_documents else f"build FOLDER --out {folder}"
        hint = f"Make one with:  streamrag index {build}"
        if Path(f"{folder}-index", MANIFEST).is_file():
            hint = f"Did you mean {folder}-index?"
        what = "is no vector index" if folder.exists() else "does not exist"
        raise IndexMissingError(f"{folder} {what}. {hint}") from error
    manifest = _parse_manifest(folder, text)
    if manifest.kind == "ivf" and manifest.num_lists is None:
        raise corrupt(folder, f"its {MANIFEST} does not say how many lists it has")
    if missing := sorted(NEEDED[manifest.kind] - manifest.files.keys()):
        raise corrupt(folder, f"its {MANIFEST} does not name {', '.join(missing)}")
    for name, entry in manifest.files.items():
        if on_file:
            on_file(name, entry.size_bytes)
        _check_file(folder, name, entry, max_hashed_bytes=inf if on_file else MAX_HASHED_BYTES)
    return manifest, hashlib.sha256(text).hexdigest()


def check_unchanged(folder: Path, manifest_sha256: str) -> None:
    """Check that the index still has the manifest with this SHA-256. Raises IndexMismatchError if it was replaced."""
    manifest = folder / MANIFEST
    if not manifest.exists() or sha256_of(manifest) != manifest_sha256:
        raise IndexMismatchError(f"{folder} was replaced while it was in use: start the source again")


def kind_in_manifest(folder: Path) -> IndexKind:
    """Return the kind in the manifest, or "diskann" if the manifest cannot be read. Checks nothing else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if parse_json(_read_manifest(folder / MANIFEST))["kind"] == "ivf":
            return "ivf"
    return "diskann"


def _read_manifest(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(MAX_SMALL_FILE_BYTES)


def _parse_manifest(folder: Path, text: bytes) -> Manifest:
    """Parse the manifest; raise IndexMismatchError for another format version, IndexCorruptError for damage."""
    try:
        fields = parse_json(text)
        version = fields["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(folder, f"its {MANIFEST} is damaged") from error
    if version != FORMAT_VERSION:
        raise IndexMismatchError(
            f"{folder} has format version {str(version)[:40]}, and streamrag reads {FORMAT_VERSION}: build it again"
        )
    try:
        return Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise corrupt(folder, f"its {MANIFEST} is damaged at {where}: {first['msg']}") from error


def _check_file(folder: Path, name: str, entry: FileEntry, *, max_hashed_bytes: float) -> None:
    """Raise IndexCorruptError unless the file has the size and, up to `max_hashed_bytes`, the hash of its entry."""
    if "\0" in name or name != Path(name).name:
        raise corrupt(folder, f"its {MANIFEST} names a file elsewhere, {name!r}")
    try:
        with open_regular(folder / name) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != entry.size_bytes:
                raise corrupt(folder, f"{name} has {size_bytes} bytes, not {entry.size_bytes}")
            if size_bytes <= max_hashed_bytes and hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise corrupt(folder, f"{name} is not as it was written (its SHA-256 differs)")
    except OSError as error:
        raise corrupt(folder, f"{name} cannot be read ({error.strerror})") from error


def corrupt(folder: Path, problem: str) -> IndexCorruptError:
    """Return the error for a damaged index, with the remedy."""
    return IndexCorruptError(
        f"the vector index {folder} is damaged: {problem}. Build it again:  "
        f"streamrag index build FOLDER --out {folder} --force"
    )


def with_title(title: str, text: str) -> str:
    """Return the text that is embedded and searched: the passage behind the title of its document."""
    return text if text.startswith(title) else f"{title}\n{text}"


def read_passages(folder: Path, name: str) -> Iterator[StoredPassage]:
    """Yield the passages of PASSAGES or DUPLICATES. Raises IndexCorruptError for a damaged line."""
    with open_regular(folder / name) as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            yield _parse_passage(folder, name, line)


def passage_line(fields: Mapping[str, Any]) -> str:
    """Format a passage as a line of `passages.jsonl`."""
    return json.dumps({name: fields[name] for name in StoredPassage.__annotations__}, ensure_ascii=False) + "\n"


class PassageStore:
    """The passages of an index, read from the file on demand. Holds 8 bytes of memory for each.

    It lives in the searching worker, so the caller's process never waits for the disk.

    :raises IndexCorruptError: the file does not hold `num_passages`.
    """

    def __init__(self, folder: Path, num_passages: int) -> None:
        self._folder = folder
        self._file = open_regular(folder / PASSAGES)
        self._ends = array("Q", [0])
        for line in iter(lambda: self._file.readline(MAX_LINE_BYTES), b""):
            self._ends.append(self._ends[-1] + len(line))
            if len(self) > num_passages or not line.endswith(b"\n"):
                raise corrupt(folder, f"{PASSAGES} has more than {num_passages} passages, or one that is too long")
        if len(self) != num_passages:
            raise corrupt(folder, f"{PASSAGES} has {len(self)} passages, not {num_passages}")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, ids: Iterable[int]) -> list[StoredPassage]:
        """Return the passages with these numbers. Raises IndexCorruptError if a line is no passage."""
        lines = (os.pread(self._file.fileno(), self._ends[i + 1] - self._ends[i], self._ends[i]) for i in ids)
        return [_parse_passage(self._folder, PASSAGES, line) for line in lines]


def _parse_passage(folder: Path, name: str, line: bytes) -> StoredPassage:
    """Parse a line of the file `name`; raise IndexCorruptError if it is no passage."""
    try:
        return _STORED.validate_json(line)
    except ValidationError as error:
        raise corrupt(folder, f"{name} has a line that is no passage") from error
