"""The keyword index of an index folder: BM25 over its passages, in one SQLite file.

    postings(term, ids, counts)   for each term the numbers of its passages, and its counts there, as arrays
    lengths(lengths)              the number of terms of each passage

Opening reads only the lengths, 2 bytes a passage; a search reads the arrays of the query's terms.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from streamrag.core.text import relevant_terms, terms
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
    from streamrag.core.text import Stem

SCHEMA = ("CREATE TABLE lengths(lengths BLOB)", "CREATE TABLE postings(term TEXT PRIMARY KEY, ids BLOB, counts BLOB)")
MAX_LENGTH, MAX_COUNT = (1 << 16) - 1, (1 << 8) - 1
K1, B = 1.2, 0.75
"""Lucene's defaults of BM25: saturation of the term frequency, and normalisation by length."""
MAX_VALUE_BYTES = 1_000_000_000  # SQLite's highest limit of the size of a value
MAX_QUERY_TERMS = 256  # number of a query's first terms that are searched: a query may be a whole book


def new_stem() -> "Stem":
    """Return a stemmer of English with a cache. It does little harm to other languages."""
    import snowballstemmer  # type: ignore[import-untyped,unused-ignore]

    stem: Stem = cache(snowballstemmer.stemmer("english").stemWord)
    return stem


def write_keywords(folder: Path) -> None:
    """Write a new keyword index of the passages in `folder`, or raise OSError. Takes 5 bytes of memory a posting."""
    passages = read_passages(folder, PASSAGES)
    lengths, postings = _count(with_title(fields["title"], fields["text"]) for fields in passages)
    path = folder / KEYWORDS
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute("PRAGMA journal_mode = OFF")  # the folder is published only when it is complete
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
    """Return each text's number of terms, and for each term the numbers of its texts and its counts there.

    The numbers of terms and the counts are capped at `MAX_LENGTH` and `MAX_COUNT`.
    """
    stem = new_stem()
    lengths = array("H")
    postings: dict[str, tuple[array[int], array[int]]] = {}
    for number, text in enumerate(texts):
        term_counts = Counter(terms(text, stem))
        lengths.append(min(term_counts.total(), MAX_LENGTH))
        for term, count in term_counts.items():
            ids, counts = postings.get(term) or postings.setdefault(term, (array("I"), array("B")))
            ids.append(number)
            counts.append(min(count, MAX_COUNT))
    return lengths, postings


class KeywordIndex:
    """The keyword index in `folder`, opened for searches. The file is read-only and untrusted.

    :raises IndexCorruptError: the file is no keyword index of `num_passages`.
    """

    def __init__(self, folder: Path, num_passages: int) -> None:
        import numpy as np

        self._folder = folder
        self._stem = new_stem()
        try:
            address = f"file:{quote(str(folder / KEYWORDS))}?mode=ro&immutable=1"
            self._file = sqlite3.connect(address, uri=True, check_same_thread=False)
            # An array has at most one number for each passage: a longer value is an error before it takes memory.
            self._file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(4 * num_passages + 10_000, MAX_VALUE_BYTES))
            schema = self._file.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name")
            if tuple(sql for (sql,) in schema) != SCHEMA:  # a view could compute anything
                raise ValueError("its tables have another schema")
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
        """Return numbers and scores, over 0, of the `k` best passages, best first; IndexCorruptError for damage."""
        import numpy as np

        scores = np.zeros_like(self._norms)
        for ids, counts in self._postings(relevant_terms(query, self._stem)[:MAX_QUERY_TERMS]):
            rarity = np.log1p((len(self._norms) - len(ids) + 0.5) / (len(ids) + 0.5))
            scores[ids] += rarity * (K1 + 1) * counts / (counts + self._norms[ids])
        hits = np.flatnonzero(scores)
        if len(hits) > k:
            hits = hits[np.argpartition(-scores[hits], k)[:k]]
        hits = hits[np.lexsort((hits, -scores[hits]))]
        return hits.tolist(), scores[hits].tolist()

    def _postings(self, query_terms: list[str]) -> Iterator[tuple[Any, Any]]:
        """Yield passage numbers and counts of each term that occurs; raise IndexCorruptError for damaged ones."""
        import numpy as np

        for term in query_terms:
            try:
                row = self._file.execute("SELECT ids, counts FROM postings WHERE term = ?", (term,)).fetchone()
                if row is None:
                    continue
                ids, counts = np.frombuffer(row[0], np.uint32), np.frombuffer(row[1], np.uint8)
                is_increasing = len(ids) == len(counts) > 0 and (ids[1:] > ids[:-1]).all()
                if not is_increasing or ids[-1] >= len(self._norms):
                    raise ValueError("its postings are no lists of passages")
            except UnicodeEncodeError:  # a lone surrogate, which no passage has
                continue
            except (sqlite3.Error, ValueError, TypeError) as error:
                raise self._corrupt(error) from error
            yield ids, counts.astype(np.float32)

    def _corrupt(self, error: Exception) -> Exception:
        return corrupt(self._folder, f"{KEYWORDS} is no keyword index: {error}")


@dataclass
class KeywordSearcher(JobHandler):
    """A handler of searches in the keyword index."""

    folder: str
    manifest_sha256: str
    num_passages: int

    def load(self) -> dict[str, Any]:
        """Open the index for searches."""
        return {"num_passages": len(self._opened[1])}

    def search(self, query: str, k: int) -> dict[str, Any]:
        """Return the passages that have words of the query, best first."""
        index, passages = self._opened
        return {"passages": passages.read(index.search(query, k)[0])}

    @cached_property
    def _opened(self) -> tuple[KeywordIndex, PassageStore]:
        folder = Path(self.folder)
        check_unchanged(folder, self.manifest_sha256)
        return KeywordIndex(folder, self.num_passages), PassageStore(folder, self.num_passages)
