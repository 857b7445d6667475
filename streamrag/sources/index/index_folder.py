"""The folder of a vector index: its files, and the checks before they are used.

manifest.json           what the index was made with, and the size and SHA-256 of the other files
passages.jsonl          one passage a line, in the order of its vectors
duplicates.jsonl        passages that were left out because an equal one is there, for when that one is removed

Kind "diskann":
vectors.f32             the vectors as they came from the embedder, for when documents are added or removed
ann_disk.index          DiskANN's graph with the full vectors, read at every search
ann_pq_*.bin            DiskANN's compressed vectors, held in the searcher's memory
ann_metadata.bin        DiskANN's number of vectors, dimension and metric
keywords.sqlite         the keyword index, see `keywords.py`; indexes of older versions have none

Kind "ivf":
ivf.index               faiss's inverted lists with the full vectors, mapped into memory and read at every search

Format 1 had one kind, "diskann", and neither duplicates.jsonl nor vectors.f32.
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
from streamrag.support.bounded_reading import MAX_LINE_BYTES, open_regular, parse_json, read_bytes

IndexKind: TypeAlias = Literal["diskann", "ivf"]

FORMATS = (1, 2)
MANIFEST, PASSAGES, DUPLICATES = "manifest.json", "passages.jsonl", "duplicates.jsonl"
KEYWORDS = "keywords.sqlite"
VECTORS, IVF = "vectors.f32", "ivf.index"
DISKANN = {"ann_disk.index", "ann_metadata.bin", "ann_pq_compressed.bin", "ann_pq_pivots.bin"}
NEEDED: dict[str, set[str]] = {"diskann": {PASSAGES} | DISKANN, "ivf": {PASSAGES, IVF}}
"""The files without which an index of this kind cannot be searched."""

MAYBE = {DUPLICATES, KEYWORDS, VECTORS} | {
    f"ann_disk.index_{name}.bin" for name in ("centroids", "medoids", "max_base_norm")
}
"""Files that may be there too: for adding and removing, and DiskANN's for large indexes and other metrics."""

MAX_HASHED_BYTES = 64 << 20
"""Files up to this size are read and compared with their SHA-256 when an index is opened; of larger ones only the size
is, unless every byte is asked for."""


OnFile: TypeAlias = Callable[[str, int], None]
"""A function of a file's name and its bytes."""

_Count: TypeAlias = Annotated[int, Field(gt=0, lt=1 << 31)]


class FileEntry(BaseModel):
    """The entry of a file in the manifest."""

    model_config = ConfigDict(frozen=True)

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """The record of what an index was made with."""

    model_config = ConfigDict(frozen=True)

    format_version: Literal[1, 2] = 2
    kind: IndexKind = "diskann"
    created: datetime
    embedder: Annotated[str, Field(max_length=1000)]
    """Name for people; only the default one is found by it. See `embedder_of_index`."""
    dimension: _Count
    probe: tuple[float, ...]
    """See `EmbedderIdentity`."""
    is_normalized: Literal[True] = True
    metric: Literal["l2"] = "l2"
    """The metric of the distances, which are squared: between unit vectors they are 2 - 2 * cosine similarity."""
    num_documents: _Count
    num_passages: _Count
    passage_words: _Count
    graph_degree: _Count | None = None
    """Degree of DiskANN's graph; `build_complexity` is DiskANN's too."""
    build_complexity: _Count | None = None
    num_lists: Annotated[int, Field(gt=0, lt=1 << 15)] | None = None
    """Number of an IVF index's inverted lists; the memory for opening it grows with them."""
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
    """Whether this folder holds files of an index, damaged or not, and no others: no other work is lost with it."""
    with os.scandir(folder) as entries:
        names = {entry.name if entry.is_file(follow_symlinks=False) else "" for entry in entries}
    if not names <= set().union(MAYBE, {MANIFEST}, *NEEDED.values()):
        return False
    # Many programs have a manifest.json, and a passages.jsonl: only what the library writes beside them makes an index.
    has_all = any(names >= needed for needed in NEEDED.values())
    return has_all or (MANIFEST in names and not names <= {MANIFEST, PASSAGES, DUPLICATES, KEYWORDS, VECTORS})


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open_regular(path, follow_links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Return an entry for each file of a folder that is to become an index."""
    paths = sorted(folder.iterdir())
    return {path.name: FileEntry(size_bytes=path.stat().st_size, sha256=sha256(path)) for path in paths}


def check_index(folder: Path, *, on_file: OnFile | None = None) -> tuple[Manifest, str]:
    """Return the manifest of a whole index, and the manifest's own SHA-256. Reads files of up to 64 MiB.

    on_file: called before each file with its name and size; with it, files of any size are read.

    :raises IndexMissingError: there is none.
    :raises IndexMismatchError: it is in a format of another version of streamrag.
    :raises IndexCorruptError: its files are not those that were written.
    """
    path = folder / MANIFEST
    try:
        text = read_bytes(path, follow_links=False)
    except ValueError as error:
        raise corrupt(folder, f"its {MANIFEST} is no manifest: {error}") from error
    except OSError as error:
        if folder.is_dir() and looks_like_index(folder):
            raise corrupt(folder, f"its {MANIFEST} cannot be read ({error.strerror})") from error
        raise IndexMissingError(
            f"{folder} is no vector index. Make one with:  streamrag index build FOLDER --out {folder}"
        ) from error
    manifest = _parse_manifest(folder, text)
    if manifest.kind == "ivf" and manifest.num_lists is None:
        raise corrupt(folder, f"its {MANIFEST} does not say how many lists it has")
    if missing := sorted(NEEDED[manifest.kind] - manifest.files.keys()):
        raise corrupt(folder, f"its {MANIFEST} does not name {', '.join(missing)}")
    for name, entry in manifest.files.items():
        if on_file:
            on_file(name, entry.size_bytes)
        _check_file(folder, name, entry, most_bytes=inf if on_file else MAX_HASHED_BYTES)
    return manifest, hashlib.sha256(text).hexdigest()


def check_unchanged(folder: Path, manifest_sha256: str) -> None:
    """Check that the index is still the one that had this manifest.

    :raises IndexMismatchError: it was replaced.
    """
    manifest = folder / MANIFEST
    if not manifest.exists() or sha256(manifest) != manifest_sha256:
        raise IndexMismatchError(f"{folder} was replaced while it was in use: start the source again")


def kind_in_manifest(folder: Path) -> IndexKind:
    """Return the kind that the manifest names; "diskann" if it names none. Nothing is checked."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if parse_json(read_bytes(folder / MANIFEST, follow_links=False))["kind"] == "ivf":
            return "ivf"
    return "diskann"


def _parse_manifest(folder: Path, text: bytes) -> Manifest:
    try:
        fields = parse_json(text)
        version = fields["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(folder, f"its {MANIFEST} is damaged") from error
    if version not in FORMATS:
        raise IndexMismatchError(
            f"{folder} has format version {str(version)[:40]}, and this streamrag reads 1 and 2: build it again"
        )
    try:
        return Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise corrupt(folder, f"its {MANIFEST} is damaged at {where}: {first['msg']}") from error


def _check_file(folder: Path, name: str, entry: FileEntry, *, most_bytes: float) -> None:
    """Check the file's size, and its SHA-256 if it has at most `most_bytes`."""
    path = folder / name
    if "\0" in name or name != Path(name).name:
        raise corrupt(folder, f"its {MANIFEST} names a file elsewhere, {name!r}")
    try:
        with open_regular(path, follow_links=False) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != entry.size_bytes:
                raise corrupt(folder, f"{name} has {size_bytes} bytes, not {entry.size_bytes}")
            if size_bytes <= most_bytes and hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise corrupt(folder, f"{name} is not as it was written (its SHA-256 differs)")
    except OSError as error:
        raise corrupt(folder, f"{name} cannot be read ({error.strerror})") from error


def corrupt(folder: Path, what: str) -> IndexCorruptError:
    """Return the error for a damaged index, with the remedy."""
    return IndexCorruptError(
        f"the vector index {folder} is damaged: {what}. Build it again:  "
        f"streamrag index build FOLDER --out {folder} --force"
    )


def with_title(title: str, text: str) -> str:
    """Return the text by which a passage is searched: behind the title, which says what the document is about."""
    return text if text.startswith(title) else f"{title}\n{text}"


def read_passages(folder: Path, name: str) -> Iterator[StoredPassage]:
    """Yield the fields of each passage in `name`, PASSAGES or DUPLICATES; nothing if there is no such file.

    :raises IndexCorruptError: a line is no passage.
    """
    if not (folder / name).exists():
        return
    with open_regular(folder / name, follow_links=False) as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            yield _parse_passage(folder, name, line)


def passage_line(fields: Mapping[str, Any]) -> str:
    """Return the line of `passages.jsonl` for a passage."""
    return json.dumps({name: fields[name] for name in StoredPassage.__annotations__}, ensure_ascii=False) + "\n"


class PassageStore:
    """The passages of an index, read when they are asked for: 8 bytes of memory each.

    Lives in the searching worker: the caller's process holds neither a table nor a file, and never waits for a disk.

    :raises IndexCorruptError: there are not `num_passages`.
    """

    def __init__(self, folder: Path, num_passages: int) -> None:
        self._folder = folder
        self._file = open_regular(folder / PASSAGES, follow_links=False)
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
        """Return the fields of the passages with these numbers.

        :raises IndexCorruptError: what stands there is no passage.
        """
        lines = (os.pread(self._file.fileno(), self._ends[i + 1] - self._ends[i], self._ends[i]) for i in ids)
        return [_parse_passage(self._folder, PASSAGES, line) for line in lines]


def _parse_passage(folder: Path, name: str, line: bytes) -> StoredPassage:
    try:
        return _STORED.validate_json(line)
    except ValidationError as error:
        raise corrupt(folder, f"{name} has a line that is no passage") from error
