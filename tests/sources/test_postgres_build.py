"""Filling a table, against a real PostgreSQL with pgvector."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from postgres_server import execute, postgres_server
from psycopg import sql
from source_helpers import alive
from toy_corpus import EMBEDDER, write_documents

from streamrag.errors import (
    ConfigurationError,
    IndexExistsError,
    IndexMismatchError,
    SourceError,
    VectorIndexError,
    WorkerError,
)
from streamrag.sources.postgres.build import TableSummary, build_table
from streamrag.sources.postgres.source import PgVectorSource
from streamrag.sources.postgres.table_writer import LOCK_SPACE

SECRET = "s3cr3t-w0rd"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as dsn:
        yield dsn


@pytest.fixture
def dsn(server: str, tmp_path: Path) -> Iterator[str]:
    """A database of its own, without pgvector: the build makes the extension."""
    execute(server, "CREATE DATABASE docs")
    yield psycopg.conninfo.make_conninfo(server, dbname="docs")
    execute(server, "DROP DATABASE docs WITH (FORCE)")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents", 20)


def build(folder: Path, dsn: str, **options: Any) -> TableSummary:
    return build_table(folder, dsn, **{"embedder": EMBEDDER} | options)


def contents(dsn: str, table: str = "passages") -> list[tuple[Any, ...]]:
    query = sql.SQL("SELECT uri, passage, title, text, embedding::text, xmin::text FROM {} ORDER BY 1, 2")
    return execute(dsn, query.format(sql.Identifier(*table.split("."))))


def words(number: int) -> str:
    return " ".join(f"p{number}word{place}" for place in range(12))


def write_passages(path: Path, *numbers: int) -> None:
    """A document of paragraphs, each of which is a passage if `passage_words` is 12."""
    path.write_text("\n\n".join(map(words, numbers)))


def test_a_table_is_filled_and_found_in(dsn: str, documents: Path) -> None:
    told: list[tuple[int, int, str]] = []
    summary = build(documents, dsn, on_progress=lambda *line: told.append(line))
    assert (summary.num_documents, summary.num_passages, summary.num_embedded, summary.dimension) == (20, 20, 20, 64)
    assert (summary.num_removed, summary.num_duplicates, summary.skipped) == (0, 0, ())
    assert (told[0], told[-1]) == ((0, 20, "filling"), (2, 2, "indexing"))
    text = (documents / "0007.txt").read_text()

    async def search() -> list[Any]:
        source = PgVectorSource(dsn, k=1, embedder=EMBEDDER)
        await source.start(lambda line: None)
        try:
            assert source._opened
            table = source._opened.table
            assert (table.words, table.metric, table.ladder is not None) == ("english", "cosine", True)
            assert table.made_with
            return [event async for event in source.stream(f"0007 {text}")]
        finally:
            await source.aclose()

    (update,) = asyncio.run(search())  # words and vector find the same
    assert (update.chunks[0].uri, update.chunks[0].title, update.chunks[0].text) == ("0007.txt", "0007", text)


def test_unchanged_documents_are_left_as_they_are(dsn: str, documents: Path) -> None:
    build(documents, dsn)
    before = contents(dsn)
    (documents / "0003.txt").write_text("something else now")
    (documents / "more.txt").write_text("one document more")
    summary = build(documents, dsn)
    assert (summary.num_documents, summary.num_embedded, summary.num_removed) == (21, 2, 0)
    after = contents(dsn)
    assert len(after) == 21
    assert {row[0] for row in {*after} - {*before}} == {"0003.txt", "more.txt"}
    assert build(documents, dsn).num_embedded == 0
    assert contents(dsn) == after


def test_passages_that_a_document_no_longer_has_are_removed(dsn: str, documents: Path) -> None:
    path = documents / "long.txt"
    write_passages(path, 1, 2, 3, 4)
    build(documents, dsn, passage_words=12)
    assert [row[1] for row in contents(dsn) if row[0] == "long.txt"] == [0, 1, 2, 3]
    write_passages(path, 1, 5)
    summary = build(documents, dsn, passage_words=12)
    assert (summary.num_embedded, summary.num_removed) == (1, 2)
    assert [row[3] for row in contents(dsn) if row[0] == "long.txt"] == [words(1), words(5)]


def test_documents_that_are_not_in_the_folder_stay_unless_it_is_pruned(dsn: str, documents: Path) -> None:
    build(documents, dsn)
    for path in sorted(documents.iterdir())[:5]:
        path.unlink()
    assert build(documents, dsn).num_removed == 0
    assert len(contents(dsn)) == 20
    assert build(documents, dsn, prune=True).num_removed == 5
    assert [row[0] for row in contents(dsn)] == [path.name for path in sorted(documents.iterdir())]


def test_the_same_text_is_there_once(dsn: str, documents: Path) -> None:
    (documents / "a.txt").write_text((documents / "0001.txt").read_text())
    summary = build(documents, dsn)
    assert (summary.num_passages, summary.num_duplicates) == (20, 1)


def test_a_build_that_was_killed_goes_on_where_it_was(dsn: str, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents", 300)
    (documents / "0299.txt").write_text(f"wait until {tmp_path}/never")
    code = "import sys; from streamrag import build_table; build_table(*sys.argv[1:3], embedder=sys.argv[3])"
    here = str(Path(__file__).parent)
    killed = subprocess.Popen(
        [sys.executable, "-c", code, str(documents), dsn, EMBEDDER], env={**os.environ, "PYTHONPATH": here}
    )
    waiting = tmp_path / "never.waiting"
    end_s = time.monotonic() + 30
    while not (waiting.exists() and waiting.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while alive(int(waiting.read_text())):
        time.sleep(0.01)
    assert len(contents(dsn)) == 256
    (tmp_path / "never").touch()
    summary = build(documents, dsn)
    assert (summary.num_passages, summary.num_embedded) == (300, 44)
    assert len(contents(dsn)) == 300


def test_a_connection_that_dies_leaves_what_is_filled(dsn: str, server: str, documents: Path) -> None:
    def kill(done: int, total: int, step: str) -> None:
        if (done, step) == (10, "filling"):
            execute(server, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'docs'")

    with pytest.raises(SourceError, match="terminating connection"):
        build(documents, dsn, on_progress=kill)
    assert build(documents, dsn).num_embedded == 20


def test_two_builds_of_a_table_do_not_run_at_once(dsn: str, documents: Path) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("SELECT pg_advisory_lock(%s, hashtext('public.passages'))", [LOCK_SPACE])
        for table in ("passages", "public.passages"):
            with pytest.raises(VectorIndexError, match=f"another build fills table {table}"):
                build(documents, dsn, table=table)
        assert build(documents, dsn, table="others").num_embedded == 20


def test_a_build_waits_for_the_lock_of_one_that_has_just_ended(dsn: str, documents: Path) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("SELECT pg_advisory_lock(%s, hashtext('public.passages'))", [LOCK_SPACE])
        ending = threading.Timer(0.3, other.execute, ["SELECT pg_advisory_unlock_all()"])
        ending.start()
        assert build(documents, dsn).num_embedded == 20
        ending.join()


def test_names_and_texts_may_be_anything(dsn: str, documents: Path) -> None:
    for path in documents.iterdir():
        path.unlink()
    (documents / "100% %s {} 'a' \"b\".txt").write_text("a text with a % and 'quotes'")
    (documents / "nul.html").write_bytes(b"<title>T</title><p>before&#0;after &#xD800; \xf0\x9f\x92\xa9</p>")
    (documents / os.fsdecode(b"caf\xe9.txt")).write_text("a name that is no UTF-8")
    (documents / "long.md").write_text(f"# {'T' * 100_000}\n\n{'x' * 200_000}")
    execute(dsn, 'CREATE SCHEMA "my %s"')
    table = ("my %s", 'a "b" %s {}')
    summary = build(documents, dsn, table=table, words="simple")
    assert summary.num_documents == 4
    assert build(documents, dsn, table=table, words="simple").num_embedded == 0
    uris = {row[0] for row in execute(dsn, sql.SQL("SELECT uri FROM {}").format(sql.Identifier(*table)))}
    assert uris == {os.fsencode(path.name).decode(errors="replace") for path in documents.iterdir()}


def test_a_table_of_others_is_left_alone(dsn: str, documents: Path) -> None:
    execute(dsn, "CREATE TABLE passages (uri text)", "INSERT INTO passages VALUES ('mine')")
    with pytest.raises(IndexExistsError, match="a table passages that streamrag did not make"):
        build(documents, dsn)
    assert execute(dsn, "SELECT * FROM passages") == [("mine",)]


@pytest.mark.parametrize(("name", "how"), [("other", "other vectors for the same text"), ("wide", "128 dimensions")])
def test_another_embedder_is_a_mismatch(dsn: str, documents: Path, name: str, how: str) -> None:
    build(documents, dsn)
    before = contents(dsn)
    with pytest.raises(IndexMismatchError, match=f"was filled with embedder='toy_embedder:embed', .* gives {how}"):
        build(documents, dsn, embedder=f"toy_embedder:{name}")
    assert contents(dsn) == before


def test_a_user_without_rights_is_told(dsn: str, documents: Path) -> None:
    execute(dsn, "DROP ROLE IF EXISTS reader", "CREATE ROLE reader LOGIN", "CREATE EXTENSION vector")
    with pytest.raises(VectorIndexError, match="permission denied for schema public"):
        build(documents, psycopg.conninfo.make_conninfo(dsn, user="reader"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"passage_words": 5}, ConfigurationError, "passage_words=5"),
        ({"max_file_bytes": 0}, ConfigurationError, "max_file_bytes=0"),
        ({"table": ""}, ConfigurationError, "table=''"),
        ({"embedder": "toy_embedder:none"}, ConfigurationError, "cannot be loaded"),
        ({"words": "klingon"}, VectorIndexError, 'text search configuration "klingon" does not exist'),
        ({"table": "nowhere.passages"}, VectorIndexError, 'schema "nowhere" does not exist'),
    ],
)
def test_build_options_that_cannot_work_are_refused_and_make_no_table(
    dsn: str, documents: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build(documents, dsn, **options)
    assert execute(dsn, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]


def test_a_folder_without_documents_is_refused(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="holds no text, Markdown, HTML or PDF"):
        build(tmp_path / "empty", dsn)


async def test_a_build_refuses_to_block_an_event_loop(dsn: str, documents: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread"):
        build(documents, dsn)


def test_an_embedder_that_dies_leaves_what_is_filled(dsn: str, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents", 140)
    (documents / "0139.txt").write_text("die now")
    with pytest.raises(WorkerError, match="exit code 9"):
        build(documents, dsn)
    assert len(contents(dsn)) == 128


def test_a_server_that_is_not_there_is_an_error_without_the_password(documents: Path) -> None:
    with pytest.raises(SourceError, match=r"127.0.0.1:1.*refused") as raised:
        build(documents, f"postgresql://me:{SECRET}@127.0.0.1:1/docs")
    assert SECRET not in f"{raised.value} {raised.value.__cause__}"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "streamrag", *words],
        env={**os.environ, "PYTHONPATH": here, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_command_fills_a_table_whose_dsn_is_in_the_environment(dsn: str, documents: Path, tmp_path: Path) -> None:
    build_it = ["index", "build", str(documents), "--to", "env:DOCS", "--table", "mine", "--embedder", EMBEDDER]
    done = run(*build_it, DOCS=dsn)
    assert done.returncode == 0, done.stderr
    assert "mine: 20 passages of 20 documents, 20 new or changed, 0 removed, 64 dimensions, in" in done.stderr
    assert len(contents(dsn, "mine")) == 20
    missing = run(*build_it)
    assert (missing.returncode, "there is no environment variable DOCS" in missing.stderr) == (1, True)
    trace = tmp_path / "trace.jsonl.gz"
    asked = ["record", "w1 w2 w3", "--postgres", "env:DOCS", "--table", "mine", "--embedder", EMBEDDER, "-k", "2"]
    recorded = run(*asked, "--output", str(trace), DOCS=dsn)
    assert recorded.returncode == 0, recorded.stderr
    assert trace.exists()
