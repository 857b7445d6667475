"""What others made is read within limits; only errors of ours come out."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from streamrag.errors import ConfigurationError, TraceError
from streamrag.support.bounded_reading import (
    DamagedError,
    DecompressedFile,
    open_regular,
    parse_json,
    read_bytes,
    split_lines,
)
from streamrag.trace.read import read_trace
from streamrag_bench.store import CellStore

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

HEADER = '{"format": "streamrag-trace", "version": 1}\n'


def bomb(path: Path, unit: bytes, num_units: int) -> Path:
    """A small file that unpacks to `num_units` times a `unit`."""
    if path.suffix == ".gz":
        packed = gzip.compress(unit, compresslevel=9)
    else:
        packed = zstandard.ZstdCompressor(level=19).compress(unit)
    path.write_bytes(packed * num_units)
    assert path.stat().st_size < 2 * MIB
    return path


READ_ALL = """
import sys
from pathlib import Path
from streamrag_bench.store import read_cell
from streamrag.errors import StreamRagError
from streamrag.records import read_records
from streamrag.trace.read import read_trace
import resource
imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
resource.setrlimit(resource.RLIMIT_AS, (1_500 << 20,) * 2)
for path in map(Path, sys.argv[1:]):
    for read in (read_trace, read_records, read_cell):
        try:
            read(path)
        except StreamRagError as error:
            print("refused")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - imported, "MiB")
"""


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_takes_no_more_memory_than_its_limit(suffix: str, tmp_path: Path) -> None:
    one_line = bomb(tmp_path / f"zeros{suffix}", b"\0" * (64 * MIB), 20)
    command, environment = [sys.executable, "-c", READ_ALL, str(one_line)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    *refused, memory, _ = done.stdout.split()
    assert refused == ["refused"] * 3
    assert int(memory) < 1_100  # beside what is imported; three readers, with no more than one limit at a time


def test_a_file_has_a_number_of_bytes_that_it_may_not_exceed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * (MIB + 1))
    assert len(read_bytes(path)) == MIB + 1
    with pytest.raises(ValueError, match="more than 1 MiB, the limit for such a file"):
        read_bytes(path, MIB)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_lines_have_no_byte_order_mark_and_are_in_utf_8(encoding: str, size: int) -> None:
    text = ("\ufeff" * (encoding == "utf-16-be") + "größer\n\ufeffwords").encode(encoding)
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert b"".join(split_lines(blocks)).decode() == "größer\n\ufeffwords"


def test_the_beginning_of_a_byte_order_mark_alone_is_text() -> None:
    assert list(split_lines([b"\xef"])) == [b"\xef"]
    assert list(split_lines([b"\xef\xbb", b"x"])) == [b"\xef\xbbx"]
    with pytest.raises(ValueError, match="truncated data"):
        list(split_lines([b"\xff\xfea"]))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_may_begin_with_a_byte_order_mark(encoding: str) -> None:
    assert parse_json('["ä"]'.encode(encoding)) == ["ä"]


def test_lines_are_joined_across_blocks() -> None:
    assert list(split_lines([b"a", b"b\nc", b"\n\nd"])) == [b"ab\n", b"c\n", b"\n", b"d"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_packed_in_many_members_is_read_whole(suffix: str, tmp_path: Path) -> None:
    chance = random.Random(0)
    parts = [chance.randbytes(chance.randrange(200_000)) + b"\0" * chance.randrange(3 * MIB) for _ in range(12)]
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"".join(map(pack, parts)))
    assert read_bytes(path, 64 * MIB) == b"".join(parts)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="ends too early"):
        read_bytes(path, 64 * MIB)
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(DamagedError):
        read_bytes(path, 64 * MIB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NaN", "is not a finite number"),
        ("[-Infinity]", "is not a finite number"),
        ("1e999", "1e999 is not a finite number"),
        (str(1 << 63), "a number has 19 digits"),
        ("1" * 5000, "a number has 5000 digits"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 34 + "]" * 34, "nested too deeply"),
        ('{"a":' * 33 + "1" + "}" * 33, "nested too deeply"),
        (b'"\xff"', "can't decode byte 0xff"),
        ("\ufeff1", "BOM"),
    ],
)
def test_json_that_means_harm_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_numbers_that_are_too_large_or_not_finite_may_be_read_as_none() -> None:
    text = f"[NaN, -Infinity, 1e999, {1 << 63}, {'1' * 5000}, 1.5, {(1 << 63) - 1}]"
    assert parse_json(text, is_strict=False) == [None] * 5 + [1.5, (1 << 63) - 1]


def test_json_of_every_other_kind_is_read_and_halves_of_characters_are_mended() -> None:
    assert parse_json("[" * 32 + "]" * 32)
    assert parse_json(b'{"\\ud800": ["\\uDC00x", "\\ud83d\\ude00"], "n": [1e3, -5, true, null]}') == {
        "\N{REPLACEMENT CHARACTER}": ["\N{REPLACEMENT CHARACTER}x", "\N{GRINNING FACE}"],
        "n": [1e3, -5, True, None],
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"kind": "query", "id": "1", "arrival_s": 1e15, "text": ""}, "arrival_s: Input should be less than or equal"),
        ({"kind": "chunk", "key": "a", "num_tokens": 2**31}, "num_tokens: Input should be less than 2147483648"),
        ({"kind": "chunk", "key": "a", "num_tokens": 1, "title": None}, "title: Input should be a valid string"),
        ('{"kind": "chunk", "key": "a", "num_tokens": ' + "9" * 400 + "}", "a number has 400 digits"),
        ('{"kind": "end", "query": "1", "end_s": Infinity, "outcome": "complete"}', "Infinity is not a finite number"),
    ],
)
def test_numbers_that_no_trace_has_are_named(lines: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = lines if isinstance(lines, str) else json.dumps(lines)
    path.write_text(f"{HEADER}{line}\n")
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, line 2: ")
    assert message in str(raised.value)


def test_no_file_that_is_read_can_name_code() -> None:
    """No module of ours unpickles or evaluates, and these import by name: the names are ours or the caller's own."""
    importers = set()
    for path in sorted([*(ROOT / "streamrag").rglob("*.py"), *(ROOT / "bench" / "streamrag_bench").rglob("*.py")]):
        text = path.read_text()
        text = text.replace("literal_eval(", "").replace("_exec(", "").replace("unpickled", "")
        for word in ("pickle", "marshal", "shelve", r"\beval\(", r"\bexec\(", "allow_pickle", "yaml", r"torch\.load"):
            assert not re.search(word, text), f"{path}: {word}"
        if "import_module(" in text and "backends" not in path.parts:  # which import vLLM so
            importers.add(str(path.relative_to(ROOT)))
    assert importers == {
        "streamrag/cli/program.py",  # a command of ours
        "streamrag/engine/policies.py",  # a policy of the caller's
        "streamrag/support/lazy_imports.py",  # a public name of ours
        "streamrag/sources/index/embedder.py",  # an embedder or a reranker of the caller's
        "streamrag/sources/workers/worker_main.py",  # a handler of ours
    }


def test_a_member_without_its_end_is_read_whole(tmp_path: Path) -> None:
    body = b"x" * (5 * MIB)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(body)[:-8])  # without the end of the member
    assert len(b"".join(DecompressedFile(path))) == len(body)


def read_results(path: Path) -> object:
    (path.parent / "cells").mkdir()
    path.rename(path.parent / "cells" / "x.json.gz")
    return list(CellStore(path.parent).read_all())


def test_a_pipe_a_folder_and_a_link_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    open_regular(tmp_path / "file").close()
    for name, message in {"pipe": "not a regular file", "link": "it is a link", ".": "not a regular file"}.items():
        with pytest.raises(OSError, match=message):
            open_regular(tmp_path / name)


def test_a_result_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("nowhere")
    with pytest.raises(ConfigurationError, match=r"x.json.gz is not the result of a cell"):
        read_results(tmp_path / "x")
