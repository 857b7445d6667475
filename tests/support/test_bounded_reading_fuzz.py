"""Mutated files of every kind that is read: only errors of ours come out."""

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zstandard

from streamrag.engine.costs.profile_files import load_profile
from streamrag.errors import StreamRagError
from streamrag.records import read_records
from streamrag.sources.index.index_folder import NEEDED, check_index
from streamrag.support.bounded_reading import as_dataclass
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import digest
from streamrag_bench.trace.statistics import describe
from streamrag_bench.workload import make_load

ROOT = Path(__file__).parents[2]

TRACE_LINES = [
    json.dumps(line)
    for line in (
        {"format": "streamrag-trace", "version": 1, "text": "full", "tokenizer": "words", "provenance": {"note": "x"}},
        {"kind": "query", "id": "1", "arrival_s": 0.5, "text": "why?"},
        {"kind": "chunk", "key": "a", "num_tokens": 3, "text": "one two three", "uri": "s", "title": "t"},
        {"kind": "chunk", "key": "b", "num_tokens": 4, "num_chars": 9, "passage": 1},
        {"kind": "append", "query": "1", "at_s": 0.5, "key": "a", "score": 0.5, "hint": {"num_chunks": 1, "end_s": 2}},
        {"kind": "update", "query": "1", "at_s": 1.5, "keys": ["b", "a"], "scores": [0.5, None]},
        {"kind": "skipped", "query": "1", "at_s": 1.5, "uri": "s", "reason": "r"},
        {"kind": "end", "query": "1", "end_s": 2, "outcome": "complete", "error": "e", "num_output_tokens": 5},
    )
]
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 5, 1e308, -1e308, 10**17, 2**31, "", "\ud800", "x\x1b[2J", "x" * 300, [], {}, [[]], [5],
    {"a": 5}, "../../etc/passwd", "os:system", "module:function", "NaN",
)  # fmt: skip
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"[" * 2000,
    b"\xff",
    b"\0",
    b"\n",
    b'"',
    b",",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def with_hostile_value(text: str, chance: random.Random) -> bytes:
    value = json.loads(text)
    place = chance.choice(list(places(value)))
    if not place:
        return json.dumps(chance.choice(HOSTILE)).encode()
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    match chance.randrange(4):
        case 0 if isinstance(inner, dict):
            del inner[place[-1]]
        case 1 if isinstance(inner, dict):
            inner[chance.choice(["kind", "format", "x", "\ud800"])] = chance.choice(HOSTILE)
        case _:
            inner[place[-1]] = chance.choice(HOSTILE)
    return json.dumps(value).encode()


def with_hostile_bytes(body: bytes, chance: random.Random) -> bytes:
    at, until = sorted(chance.randrange(len(body) + 1) for _ in range(2))
    piece = chance.choice([*RAW, chance.randbytes(3), body[at:until], b""])
    return body[:at] + piece + body[min(until, at + chance.randrange(20)) :]


def mutated(lines: list[str], chance: random.Random) -> bytes:
    encoded = [line.encode() for line in lines]
    for _ in range(chance.randrange(1, 4)):
        number = chance.randrange(len(encoded))
        with contextlib.suppress(ValueError, RecursionError, IndexError):  # what was broken already stays as it is
            encoded[number] = with_hostile_value(encoded[number].decode(), chance)
    body = b"\n".join(encoded) + b"\n"
    return with_hostile_bytes(body, chance) if chance.random() < 0.5 else body


def use_trace(trace: Trace) -> None:
    describe(trace).as_dict()
    make_load(CellSettings("virtual", "x", "streaming", delay=2.0), trace)


def fuzz(num: int, make: Callable[[random.Random], bytes], path: Path, read: Callable[[Path], Any]) -> int:
    """How many of the mutated files were read; the others must be refused in good order."""
    num_read = 0
    for seed in range(num):
        path.write_bytes(make(random.Random(seed)))
        try:
            read(path)
            num_read += 1
        except StreamRagError:
            continue
    return num_read


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_damaged_traces_raise_only_errors_of_ours(suffix: str, tmp_path: Path) -> None:
    def make(chance: random.Random) -> bytes:
        body = mutated(TRACE_LINES, chance)
        if suffix:
            body = gzip.compress(body) if suffix == ".gz" else zstandard.ZstdCompressor().compress(body)
            body = with_hostile_bytes(body, chance) if chance.random() < 0.5 else body
        return body

    assert fuzz(600, make, tmp_path / f"trace.jsonl{suffix}", lambda path: use_trace(read_trace(path))) > 20


PROFILES = sorted((ROOT / "streamrag" / "engine" / "profiles").glob("*.json"))


def test_a_damaged_profile_raises_only_errors_of_ours(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        profile = load_profile(str(path))
        assert 0 <= profile.step_s([(512, 1000), (1, 5)]) < float("inf")
        if profile.copies:
            assert profile.copies.in_s(5) >= 0

    texts = [path.read_text() for path in PROFILES]
    table = {
        "kind": "table", "name": "x", "device": "y", "points": [[1, 0.1], [512, 0.5]], "pair_s": 1e-9,
        "request_s": 1e-6, "kv_tokens": 1000, "unsteadiness": [1.0, 1.5], "provenance": {"a": {"b": 1}},
        "own_pair_s": None,
        "copies": {"out_points": [[1, 0.1], [2, 0.2]], "in_points": [[1, 0.1]], "block_bytes": 5,
                   "is_overlapped": True},
    }  # fmt: skip
    texts += [json.dumps(table)] * 4

    def make(chance: random.Random) -> bytes:
        return mutated([json.dumps(json.loads(chance.choice(texts)))], chance)

    assert fuzz(600, make, tmp_path / "profile.json", read) > 20


def test_a_damaged_result_raises_only_errors_of_ours(tmp_path: Path) -> None:
    settings = CellSettings("virtual", "crawler", "streaming", qps=1.0)
    store = CellStore(tmp_path)
    path = store.write(as_dataclass(CellResult, {**RESULT, "settings": asdict(settings)}))
    header, _, result = gzip.decompress(path.read_bytes()).decode().partition("\n")
    assert digest(read_cell(path)).settings == settings

    def make(chance: random.Random) -> bytes:
        first, second = json.loads(header.removesuffix(",") + "}"), json.loads("{" + result)
        parts = [json.dumps(first)[:-1] + ",", json.dumps(second)[1:]]
        number = chance.randrange(2)
        source = json.dumps((first, second)[number])
        changed = with_hostile_value(source, chance).decode()
        parts[number] = changed[:-1] + "," if number == 0 else changed[1:]
        body = "\n".join(parts).encode()
        return gzip.compress(with_hostile_bytes(body, chance) if chance.random() < 0.3 else body)

    def read_all(path: Path) -> None:
        for found in store.read_all():
            digest(found)

    assert fuzz(300, make, path, read_all) > 5


RESULT = {
    "requests": [
        {"query_id": "1", "arrival_s": 0.0, "retrieval_end_s": 1.0, "first_token_s": 1.5, "finished_s": 2.0,
         "num_chunks": 3, "floor_s": 0.1, "record": None}
    ],
    "busy_s": 1.0, "completion_s": 2.0, "wall_s": 0.1, "provenance": {"x": {"y": 1}},
    "steps": [{"start_s": 0.0, "end_s": 1.0, "num_tokens": 5, "num_requests": 1,
               "parts": [{"query_id": "1", "num_tokens": 5}]}],
    "copies": [{"query_id": "1", "direction": "to-host", "start_s": 0.0, "end_s": 1.0, "num_tokens": 5}],
    "copy_totals": {"num_blocks_saved": 1},
}  # fmt: skip


def test_damaged_records_raise_only_errors_of_ours(tmp_path: Path) -> None:
    record = {
        "request_id": "r", "outcome": "finished", "is_stream": True, "arrival_s": 0.0, "queued_s": 0.0,
        "scheduled_s": 1.0, "first_kv_s": 1.0, "last_kv_s": 1.5, "finished_s": 2.0, "num_prompt_tokens": 5,
        "num_output_tokens": 2, "num_computed": 5, "num_recomputed": 0, "num_invalidated": 0, "num_from_cache": 0,
    }  # fmt: skip
    path = tmp_path / "records.jsonl"
    assert fuzz(200, lambda chance: mutated([json.dumps(record)] * 2, chance), path, read_records) > 2


def test_a_damaged_manifest_raises_only_errors_of_ours(tmp_path: Path) -> None:
    entry = {"size_bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    names = sorted(NEEDED["diskann"])
    for name in names:
        (tmp_path / name).touch()
    manifest = {
        "format_version": 2, "kind": "diskann", "created": "2026-01-01T00:00:00Z", "embedder": "all-MiniLM-L6-v2",
        "dimension": 3, "probe": [0.1], "num_documents": 1, "num_passages": 1, "passage_words": 9, "graph_degree": 4,
        "build_complexity": 5, "packages": {"a": "1"}, "files": dict.fromkeys(names, entry),
    }  # fmt: skip
    path = tmp_path / "manifest.json"
    num_read = fuzz(600, lambda chance: mutated([json.dumps(manifest)], chance), path, lambda _: check_index(tmp_path))
    assert num_read > 20
