"""The keyword index: its scores, and files that are none."""

import json
import shutil
import sqlite3
from collections import Counter
from dataclasses import asdict
from math import log1p
from pathlib import Path

import pytest
from rank_bm25 import BM25Okapi  # type: ignore[import-untyped,unused-ignore]

from streamrag.core import Chunk
from streamrag.core.text import terms
from streamrag.errors import IndexCorruptError
from streamrag.sources.index.index_folder import PASSAGES, passage_line
from streamrag.sources.index.keywords import KEYWORDS, KeywordIndex, new_stem, write_keywords

TEXTS = [
    "Brake pads are worn out when the grooves are gone. Replace both brake pads at once.",
    "Inflate tyres to the pressure printed on their side wall.",
    "A starter is flour and water in which wild yeast lives.",
    "The café closes at nine; the CamelCaseName does not.",
    "自転車のブレーキを交換する",
    "Brake gently. " * 300,
    "",
    "Reise\xadkosten\xaderstattung in Zu\u0308rich für misﬁts, كِتَاب",
]


def write(folder: Path, texts: list[str] = TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [passage_line(asdict(Chunk(text, f"{number}.md", f"Title{number}"))) for number, text in enumerate(texts)]
    (folder / PASSAGES).write_text("".join(lines), encoding="utf-8")
    write_keywords(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("keywords") / "index")


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(folder, tmp_path / "index"))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("When do I have to change a brake pad?", [0, 5]),
        ("tyre pressures", [1]),
        ("camel", [3]),
        ("ブレーキ", [4]),
        ("CAFÉ", [3]),
        ("title2", [2]),
        ("Reisekostenerstattung", [7]),
        ("ZÜRICH", [7]),
        ("rich", []),
        ("ｍｉｓｆｉｔｓ", [7]),
        ("كتاب", [7]),
        ("nothing like it", []),
        ("", []),
        ("🙂", []),
        ("\ud800 brake", [0, 5]),
        ("brake' OR 99=99; DROP TABLE postings; --", [0, 5]),
        ("brake " * 100_000, [0, 5]),
        ("".join(f"unknown{number} " for number in range(1000)) + "brake", []),
    ],
)
def test_the_keyword_index_finds_the_passages_with_words_of_the_query(
    folder: Path, query: str, expected: list[int]
) -> None:
    index = KeywordIndex(folder, len(TEXTS))
    ids, scores = index.search(query, 10)
    index.close()
    assert sorted(ids) == expected
    assert scores == sorted(scores, reverse=True)


def test_scores_are_those_of_bm25_in_the_order_of_another_implementation(tmp_path: Path) -> None:
    documents = Path(__file__).parent.glob("*.py")
    texts = [path.read_text()[:3000] for path in sorted(documents)]
    index = KeywordIndex(write(tmp_path, texts), len(texts))
    stem = new_stem()
    found = [terms(f"Title{number}\n{text}", stem) for number, text in enumerate(texts)]
    mean = sum(map(len, found)) / len(found)
    peer = BM25Okapi(found, k1=1.2, b=0.75)
    peer.idf = {
        term: log1p((len(found) - df + 0.5) / (df + 0.5))
        for term, df in Counter(t for f in found for t in set(f)).items()
    }
    assert peer.avgdl == pytest.approx(mean)
    for query in ("worker that dies", "cancel a search", "path index manifest", "assert"):
        expected = peer.get_scores(list(dict.fromkeys(terms(query, stem) if query == "assert" else relevant(query))))
        ids, scores = index.search(query, len(texts))
        assert dict(zip(ids, scores, strict=True)) == pytest.approx(
            {number: score for number, score in enumerate(expected) if score > 0}, rel=1e-4
        )
        assert index.search(query, 3) == (ids[:3], scores[:3])
    index.close()


def relevant(query: str) -> list[str]:
    from streamrag.core.text import relevant_terms

    return relevant_terms(query, new_stem())


def test_equal_passages_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    lines = [passage_line(asdict(Chunk("brake", "a.md", "", number))) for number in range(50)]
    (tmp_path / PASSAGES).write_text("".join(lines))
    write_keywords(tmp_path)
    index = KeywordIndex(tmp_path, 50)
    assert index.search("brake", 50)[0] == list(range(50))
    index.close()


def rewrite(folder: Path, statement: str, *values: object) -> None:
    file = sqlite3.connect(folder / KEYWORDS)
    with file:
        file.execute(statement, values)
    file.close()


BRAKE = "UPDATE postings SET {} WHERE term = 'brake'"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / KEYWORDS).write_bytes(b"happy families"), "file is not a database"),
        (lambda folder: (folder / KEYWORDS).write_bytes(b""), "its tables have another schema"),
        (lambda folder: (folder / KEYWORDS).unlink(), "unable to open"),
        (lambda folder: rewrite(folder, "DROP TABLE postings"), "its tables have another schema"),
        (lambda folder: rewrite(folder, "CREATE VIEW more AS SELECT 1"), "its tables have another schema"),
        (lambda folder: rewrite(folder, "DELETE FROM lengths"), "NoneType"),
        (lambda folder: rewrite(folder, "UPDATE lengths SET lengths = ?", b"\1\0"), "has 1 passages, not 8"),
        (lambda folder: rewrite(folder, "UPDATE lengths SET lengths = ?", b"\1" * 15), "buffer size"),
        (lambda folder: rewrite(folder, "UPDATE lengths SET lengths = 'text'"), "bytes-like"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = ?"), b"\xff" * 8), "no lists of passages"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = ?"), b"\0" * 8), "no lists of passages"),
        (lambda folder: rewrite(folder, BRAKE.format("counts = ?"), b"\1"), "no lists of passages"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = NULL")), "bytes-like|NoneType"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = ''")), "bytes-like|str"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = x'', counts = x''")), "no lists of passages"),
        (lambda folder: rewrite(folder, BRAKE.format("ids = zeroblob(1000000)")), "too big"),
    ],
)
def test_a_damaged_keyword_index_is_corrupt(broken: Path, damage: object, message: str) -> None:
    damage(broken)  # type: ignore[operator]
    with pytest.raises(IndexCorruptError, match=f"keywords.sqlite is no keyword index: .*(?:{message})"):
        KeywordIndex(broken, len(TEXTS)).search("brake", 5)


def test_an_index_that_claims_two_billion_passages_is_corrupt(folder: Path) -> None:
    with pytest.raises(IndexCorruptError, match="has 8 passages, not 2147483647"):
        KeywordIndex(folder, (1 << 31) - 1)


def test_a_disk_that_is_full_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(sqlite3.Connection):
        def executemany(self, *args: object) -> sqlite3.Cursor:
            raise sqlite3.OperationalError("database or disk is full")

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, factory=Full, **options))
    with pytest.raises(OSError, match=r"disk is full\. Is there room"):
        write(tmp_path)


def test_the_keyword_index_stores_one_row_for_each_term(folder: Path) -> None:
    file = sqlite3.connect(folder / KEYWORDS)
    num_terms, num_different = file.execute("SELECT count(*), count(DISTINCT term) FROM postings").fetchone()
    ids, counts = file.execute("SELECT ids, counts FROM postings WHERE term = 'brake'").fetchone()
    file.close()
    assert num_terms == num_different
    assert (ids, counts) == (b"\0\0\0\0\5\0\0\0", b"\2\xff")
    assert json.loads((folder / PASSAGES).read_text().splitlines()[6])["text"] == ""
