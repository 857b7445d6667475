"""The keyword index of an index folder: BM25 over its passages, from one SQLite file.

    postings(term, ids, counts)   for each term the numbers of the passages that have it, and how often, as arrays
    lengths(lengths)              the number of terms of each passage

Opening reads the lengths only, 2 bytes for each passage; a search reads the arrays of the query's terms. What is stored
are counts, not scores, so passages could be added by appending to arrays; so far the file is written anew, which takes
a small part of the time that embedding takes. `make bench-hybrid` measures it beside SQLite's own full-text search and
packages.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the inverse document
frequency is Lucene's, which is never negative.
"""

import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from streamrag.errors import MissingDependencyError
from streamrag.query.relevance import relevant_terms, terms
from streamrag.sources.index.index_folder import (
    KEYWORDS,
    PASSAGES,
    PassageStore,
    check_unchanged,
    corrupt,
    read_passages,
    with_title,
)
from streamrag.sources.index.worker_jobs import JobHandler

if TYPE_CHECKING:
    from streamrag.query.relevance import Stem

SCHEMA = ("CREATE TABLE lengths(lengths BLOB)", "CREATE TABLE postings(term TEXT PRIMARY KEY, ids BLOB, counts BLOB)")
MAX_LENGTH, MAX_COUNT = (1 << 16) - 1, (1 << 8) - 1

K1, B = 1.2, 0.75
"""Lucene's: how soon further occurrences of a term stop to count, and how much long passages are held back."""

SQLITE_MOST_BYTES = 1_000_000_000
"""Most bytes of a value; SQLite takes no higher limit."""

MAX_QUERY_TERMS = 256
"""Terms of a query that are looked up, the first ones: it may be a whole book."""


def require_stemmer() -> None:
    """Check that the stemmer is installed. For the caller's process; imports nothing.

    :raises MissingDependencyError: it is not.
    """
    if not find_spec("snowballstemmer"):
        raise MissingDependencyError("snowballstemmer", "pip install 'streamrag[embed]'")


def new_stem() -> "Stem":
    """Return a stemmer of English, which does other languages little harm. It remembers: passages repeat words."""
    import snowballstemmer  # type: ignore[import-untyped,unused-ignore]

    stem: Stem = cache(snowballstemmer.stemmer("english").stemWord)
    return stem


# --------------------------------------------------------------------------------------------------------- building


def write_keywords(folder: Path) -> None:
    """Write the keyword index of the passages in `folder`. Takes about 5 bytes of memory for each term of a passage.

    :raises OSError: it cannot be written.
    """
    passages = read_passages(folder, PASSAGES)
    lengths, postings = _count(with_title(fields["title"], fields["text"]) for fields in passages)
    path = folder / KEYWORDS
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute("PRAGMA journal_mode = OFF")  # the folder is not an index before it is whole
            file.execute("BEGIN")
            for statement in SCHEMA:
                file.execute(statement)
            file.execute("INSERT INTO lengths VALUES (?)", (lengths.tobytes(),))
            rows = ((term, ids.tobytes(), counts.tobytes()) for term, (ids, counts) in sorted(postings.items()))
            file.executemany("INSERT INTO postings VALUES (?, ?, ?)", rows)
            file.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(f"{KEYWORDS} cannot be written: {error}. Is there room for it?") from error


def _count(texts: Iterable[str]) -> "tuple[array[int], dict[str, tuple[array[int], array[int]]]]":
    stem = new_stem()
    lengths = array("H")
    postings: dict[str, tuple[array[int], array[int]]] = {}
    for number, text in enumerate(texts):
        found = Counter(terms(text, stem))
        lengths.append(min(found.total(), MAX_LENGTH))
        for term, count in found.items():
            ids, counts = postings.get(term) or postings.setdefault(term, (array("I"), array("B")))
            ids.append(number)
            counts.append(min(count, MAX_COUNT))
    return lengths, postings


# -------------------------------------------------------------------------------------------------------- searching


class KeywordIndex:
    """The keyword index in `folder`, opened. Read only, and trusted in nothing: a stranger may have made it.

    :raises IndexCorruptError: it is none, or not of `num_passages`.
    """

    def __init__(self, folder: Path, num_passages: int) -> None:
        import numpy as np

        self._folder = folder
        self._stem = new_stem()
        try:
            address = f"file:{quote(str(folder / KEYWORDS))}?mode=ro&immutable=1"
            self._file = sqlite3.connect(address, uri=True, check_same_thread=False)
            # No array is longer than one number for each passage: a longer value is an error, not memory.
            self._file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(4 * num_passages + 10_000, SQLITE_MOST_BYTES))
            schema = self._file.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name")
            if tuple(sql for (sql,) in schema) != SCHEMA:  # not views, which could compute anything
                raise ValueError("its tables are others")
            (stored,) = self._file.execute("SELECT lengths FROM lengths").fetchone()
            lengths = np.frombuffer(stored, np.uint16).astype(np.float32)
            if len(lengths) != num_passages:
                raise ValueError(f"it has {len(lengths)} passages, not {num_passages}")
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._corrupt(error) from error
        self._norms = K1 * (1 - B + B * lengths / max(1.0, lengths.mean()))

    def close(self) -> None:
        self._file.close()

    def search(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """Return the numbers of the `k` passages with the highest scores over 0, and the scores, best first.

        :raises IndexCorruptError: what stands in the file are no postings.
        """
        import numpy as np

        scores = np.zeros_like(self._norms)
        for ids, counts in self._postings(relevant_terms(query, self._stem)[:MAX_QUERY_TERMS]):
            rarity = np.log1p((len(self._norms) - len(ids) + 0.5) / (len(ids) + 0.5))
            scores[ids] += rarity * (K1 + 1) * counts / (counts + self._norms[ids])
        found = np.flatnonzero(scores)
        if len(found) > k:
            found = found[np.argpartition(-scores[found], k)[:k]]
        found = found[np.lexsort((found, -scores[found]))]
        return found.tolist(), scores[found].tolist()

    def _postings(self, wanted: list[str]) -> Iterator[tuple[Any, Any]]:
        import numpy as np

        for term in wanted:
            try:
                row = self._file.execute("SELECT ids, counts FROM postings WHERE term = ?", (term,)).fetchone()
                if row is None:
                    continue
                ids, counts = np.frombuffer(row[0], np.uint32), np.frombuffer(row[1], np.uint8)
                is_growing = len(ids) == len(counts) > 0 and (ids[1:] > ids[:-1]).all()
                if not is_growing or ids[-1] >= len(self._norms):
                    raise ValueError("its postings are no lists of passages")
            except UnicodeEncodeError:  # half of a surrogate pair, which no text has
                continue
            except (sqlite3.Error, ValueError, TypeError) as error:
                raise self._corrupt(error) from error
            yield ids, counts.astype(np.float32)

    def _corrupt(self, error: Exception) -> Exception:
        return corrupt(self._folder, f"{KEYWORDS} is no keyword index: {error}")


@dataclass
class KeywordSearcher(JobHandler):
    """Answers the jobs of a keyword search."""

    folder: str
    manifest_sha256: str
    num_passages: int

    def open(self) -> dict[str, Any]:
        """Open the index for searches, and return its number of passages."""
        return {"num_passages": len(self._opened[1])}

    def search(self, query: str, k: int) -> dict[str, Any]:
        """Return the passages that have the query's words."""
        index, passages = self._opened
        return {"passages": passages.read(index.search(query, k)[0])}

    @cached_property
    def _opened(self) -> tuple[KeywordIndex, PassageStore]:
        folder = Path(self.folder)
        check_unchanged(folder, self.manifest_sha256)
        return KeywordIndex(folder, self.num_passages), PassageStore(folder, self.num_passages)
