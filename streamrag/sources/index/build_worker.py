"""The handler of the worker process that builds an index: it embeds new texts and runs the index library.

Vectors are reused from the old index and from an unfinished build. The key of a vector is a digest of its text, so a
vector is reused wherever the text stands now.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.sources.index import diskann, inverted_lists
from streamrag.sources.index.embedder import Embedder, EmbedderIdentity
from streamrag.sources.index.index_folder import (
    EMBEDDINGS,
    PASSAGES,
    VECTORS,
    IndexKind,
    StoredPassage,
    check_index,
    corrupt,
    read_passages,
    with_title,
)
from streamrag.sources.index.worker_jobs import JobHandler, silence_stdout
from streamrag.support.bounded_reading import parse_json

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors

KEY_BYTES = 16
ROWS_PER_READ = 8192
LENGTH_TOLERANCE = 1e-3


def _key(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def _embedded_text(fields: StoredPassage) -> str:
    return with_title(fields["title"], fields["text"])


class _EmbeddingFile:
    """A file of vectors in the order of their computation, each batch synced to disk before its keys are.

    Existing files are continued if they are of the same embedder (name, dimension and probe), and emptied otherwise.
    A file that was cut off counts up to its last complete row. Rows that are not unit vectors are ignored.
    """

    def __init__(self, folder: Path, embedder: Embedder, name: str) -> None:
        about, keys, vectors = (folder / name for name in EMBEDDINGS)
        self._dimension = embedder.dimension
        self._path = vectors
        self._rows: dict[bytes, int] = {}
        self._num_rows = 0
        self._keys_file, self._vectors_file = keys.open("ab"), vectors.open("ab")
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self._keys_file, fcntl.LOCK_EX)  # waits until the worker of a killed program has ended too
        made_by = {"embedder": name, "dimension": embedder.dimension, "probe": [*embedder.identity.probe]}
        row_bytes = self._dimension * 4
        made_before = None
        with suppress(OSError, ValueError):
            made_before = parse_json(about.read_bytes())
        if made_before == made_by:
            self._num_rows = min(keys.stat().st_size // KEY_BYTES, vectors.stat().st_size // row_bytes)
            self._rows = dict(self._valid_rows(keys.read_bytes()))
        self._keys_file.truncate(self._num_rows * KEY_BYTES)
        self._vectors_file.truncate(self._num_rows * row_bytes)
        about.write_text(json.dumps(made_by))

    def _valid_rows(self, keys: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield each of the joined `keys` with the number of its row, if that row is a unit vector."""
        import numpy as np

        vectors = self._vectors()
        for first in range(0, self._num_rows, ROWS_PER_READ):
            for row in np.flatnonzero(_are_units(vectors[first : first + ROWS_PER_READ])) + first:
                yield keys[row * KEY_BYTES : (row + 1) * KEY_BYTES], int(row)

    def _vectors(self) -> Any:
        """Return all vectors mapped into memory, (rows, dimension)."""
        import numpy as np

        if not self._num_rows:  # an empty file cannot be mapped
            return np.empty((0, self._dimension), np.float32)
        return np.memmap(self._path, np.float32, "r", shape=(self._num_rows, self._dimension))

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def add(self, keys: Sequence[bytes], vectors: "Vectors") -> None:
        """Append vectors and their keys, and sync both files to disk. Raises OSError if the disk is full."""
        for file, body in ((self._vectors_file, vectors.tobytes()), (self._keys_file, b"".join(keys))):
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        self._rows.update(zip(keys, range(self._num_rows, self._num_rows + len(keys)), strict=True))
        self._num_rows += len(keys)

    def rows(self) -> tuple[dict[bytes, int], Any]:
        """Return the row of each key, and all vectors, (rows, dimension)."""
        return self._rows, self._vectors()


def _are_units(vectors: "Vectors") -> Any:
    """Return which rows have length 1. Zeros and damaged rows do not."""
    import numpy as np

    with np.errstate(all="ignore"):
        return np.abs(np.linalg.norm(vectors, axis=1) - 1) < LENGTH_TOLERANCE


class _OldVectors:
    """The vectors of the index that is being changed, with a row for the key of each text."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        manifest, _ = check_index(folder)
        self.manifest = manifest
        made_with = EmbedderIdentity(manifest.embedder, manifest.dimension, manifest.probe)
        embedder.require(made_with, f"the vectors of {folder}")
        self.vectors: Vectors
        self.centroids: Vectors | None = None
        num_passages, dimension = manifest.num_passages, manifest.dimension
        if manifest.kind == "ivf":
            assert manifest.num_lists is not None
            self.vectors, self.centroids = inverted_lists.stored_vectors(
                folder, num_passages, dimension, manifest.num_lists
            )
        else:
            self.vectors = diskann.stored_vectors(folder, num_passages, dimension)
            self._nodes = diskann.stored_nodes(folder, num_passages)
        keys = [_key(_embedded_text(fields)) for fields in read_passages(folder, PASSAGES)]
        if len(keys) != num_passages or not _are_units(self.vectors).all():
            raise corrupt(folder, "its vectors are not those of its passages")
        self.rows = {key: row for row, key in enumerate(keys)}

    def nodes(self, numbers: dict[bytes, int]) -> Any:
        """Return the new passage of each node of DiskANN's graph, -1 for a removed one.

        numbers: the number of the passage with each key.
        """
        import numpy as np

        moved = np.full(self.manifest.num_passages + 1, -1, np.int32)  # the last entry is that of node -1
        for key, row in self.rows.items():
            moved[row] = numbers.get(key, -1)
        return moved[self._nodes]


@dataclass
class IndexBuilder(JobHandler):
    """A handler of the jobs of a build: `load`, then `embed` until nothing is missing, then `finish`."""

    folder: str
    kind: IndexKind
    location: str
    embedder: str
    num_threads: int
    old: str | None

    def load(self) -> dict[str, Any]:
        """Load the embedder; return its `dimension`, `probe`, and `num_missing`: distinct texts to be embedded."""
        silence_stdout()
        identity = self._embedder.identity
        num_missing = len({key for key, _ in self._missing()})
        return {"dimension": identity.dimension, "probe": identity.probe, "num_missing": num_missing}

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self.location, self.embedder, num_threads=self.num_threads, device=None)

    @cached_property
    def _old(self) -> _OldVectors | None:
        return _OldVectors(Path(self.old), self._embedder) if self.old else None

    @cached_property
    def _new(self) -> _EmbeddingFile:
        return _EmbeddingFile(Path(self.folder), self._embedder, self.location)

    def embed(self, num_texts: int) -> dict[str, Any]:
        """Embed the next `num_texts` texts without a vector, store the vectors, and return `num_embedded`, or 0."""
        missing = dict(islice(self._queue, num_texts))
        if missing:
            self._new.add(list(missing), self._embedder.passages(list(missing.values())))
        return {"num_embedded": len(missing)}

    @cached_property
    def _queue(self) -> Iterator[tuple[bytes, str]]:
        return self._missing()

    def _missing(self) -> Iterator[tuple[bytes, str]]:
        """Yield the key and the text of each passage that has no vector in the old index or the new file."""
        old = self._old.rows if self._old else {}
        for text in map(_embedded_text, read_passages(Path(self.folder), PASSAGES)):
            if (key := _key(text)) not in old and key not in self._new:
                yield key, text

    def finish(self, num_passages: int) -> dict[str, Any]:
        """Write the library's files, with the old graph or centroids if they still fit; return manifest parameters."""
        folder = Path(self.folder)
        vectors = self._write_vectors(folder / VECTORS, num_passages)
        if self.kind == "ivf":
            centroids = self._old.centroids if self._old else None
            num_lists = inverted_lists.build_lists(folder, vectors, self.num_threads, centroids)
            (folder / VECTORS).unlink()
            return {"num_lists": num_lists}
        if not self._keep_graph(folder, num_passages):
            diskann.build_graph(folder, vectors, self.num_threads)
        return {"graph_degree": diskann.GRAPH_DEGREE, "build_complexity": diskann.BUILD_COMPLEXITY}

    def _keep_graph(self, folder: Path, num_passages: int) -> bool:
        """Copy the old index's graph into `folder` if little has changed, and return whether that was done."""
        if not self._old:
            return False
        passages = enumerate(read_passages(folder, PASSAGES))
        nodes = self._old.nodes({_key(_embedded_text(fields)): number for number, fields in passages})
        return diskann.keep_graph(Path(str(self.old)), self._old.manifest, folder, nodes, num_passages)

    def _write_vectors(self, path: Path, num_passages: int) -> "Vectors":
        """Write new and old vectors in passage order; return the file mapped into memory as (passages, dimension)."""
        import numpy as np

        rows, new = self._new.rows()
        with path.open("wb") as file:  # writing to a memory map would kill the process on a full disk
            for fields in read_passages(path.parent, PASSAGES):
                key = _key(_embedded_text(fields))
                file.write(new[rows[key]] if key in rows or not self._old else self._old.vectors[self._old.rows[key]])
        return np.memmap(path, np.float32, "r", shape=(num_passages, self._embedder.dimension))
