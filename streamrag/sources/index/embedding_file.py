"""Embeddings that are made once: those of a build that was stopped, and those of the index that is changed.

A text's key is a digest of it, so a vector is used again for the same text and embedder, wherever the text stands now.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.support.bounded_reading import parse_json, read_bytes

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Embedder, Vectors

KEPT = ("embedded.json", "embedded.keys", "embedded.f32")
"""The files of a building folder that stay when a build is stopped: the embedder, a key of each text, its vector."""

KEY_BYTES = 16
NUM_ROWS_AT_ONCE = 8192
LENGTH_TOLERANCE = 1e-3


def key_of(text: str) -> bytes:
    """Return the digest by which a text is known."""
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class EmbeddingFile:
    """Vectors in the order in which they were made, each batch on the disk before its keys are.

    What is there already is gone on with if it is of this embedder, name and numbers. A file that was cut short is as
    long as its whole rows; a row that is no unit vector is as if it were not there.
    """

    def __init__(self, folder: Path, embedder: "Embedder", name: str) -> None:
        about, keys, vectors = (folder / name for name in KEPT)
        self._dimension = embedder.dimension
        self._path = vectors
        self._rows: dict[bytes, int] = {}
        self._keys_file, self._vectors_file = keys.open("ab"), vectors.open("ab")
        with suppress(OSError):  # there are no locks here
            fcntl.flock(self._keys_file, fcntl.LOCK_EX)  # until the worker of a program that was killed has ended too
        made_by = {"embedder": name, "dimension": embedder.dimension, "probe": [*embedder.identity.probe]}
        num_rows = 0
        if _read_json(about) == made_by:
            num_rows = min(keys.stat().st_size // KEY_BYTES, vectors.stat().st_size // self._row_bytes)
            self._rows = dict(self._good_rows(keys, num_rows))
        self._keys_file.truncate(num_rows * KEY_BYTES)
        self._vectors_file.truncate(num_rows * self._row_bytes)
        about.write_text(json.dumps(made_by))
        self._num_rows = num_rows

    @property
    def _row_bytes(self) -> int:
        return self._dimension * 4

    def _good_rows(self, keys: Path, num_rows: int) -> Iterator[tuple[bytes, int]]:
        import numpy as np

        found = keys.read_bytes()
        if not num_rows:
            return
        vectors = np.memmap(self._path, np.float32, "r", shape=(num_rows, self._dimension))
        for first in range(0, num_rows, NUM_ROWS_AT_ONCE):
            for row in np.flatnonzero(are_units(vectors[first : first + NUM_ROWS_AT_ONCE])) + first:
                yield found[row * KEY_BYTES : (row + 1) * KEY_BYTES], int(row)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def add(self, keys: Sequence[bytes], vectors: "Vectors") -> None:
        """Append vectors and their keys, and sync both files to disk.

        :raises OSError: the disk is full.
        """
        for file, body in ((self._vectors_file, vectors.tobytes()), (self._keys_file, b"".join(keys))):
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        self._rows.update(zip(keys, range(self._num_rows, self._num_rows + len(keys)), strict=True))
        self._num_rows += len(keys)

    def rows(self) -> tuple[dict[bytes, int], Any]:
        """Return the row of each key, and the array of the vectors."""
        import numpy as np

        if not self._num_rows:
            return {}, np.empty((0, self._dimension), np.float32)
        return self._rows, np.memmap(self._path, np.float32, "r", shape=(self._num_rows, self._dimension))


def are_units(vectors: "Vectors") -> Any:
    """Return which rows have length 1: those of an embedder do, zeros and what a broken disk gives do not."""
    import numpy as np

    with np.errstate(all="ignore"):
        return np.abs(np.linalg.norm(vectors, axis=1) - 1) < LENGTH_TOLERANCE


def _read_json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return parse_json(read_bytes(path, follow_links=False))
    return None
