"""Results in a folder."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from made import made_result, settings

from streamrag.bench.store import CellStore, cell_key, read_cell
from streamrag.errors import ConfigurationError


def test_a_written_cell_is_read_back_unchanged(tmp_path: Path) -> None:
    store, result = CellStore(tmp_path / "results"), made_result(settings(workload="anns"), with_steps=True)
    path = store.write(result)
    assert read_cell(path) == result
    assert store.find(result.settings, with_steps=True) == path
    assert [p.name for p in store.cells.iterdir()] == [path.name]  # and no unfinished file
    assert json.loads(gzip.decompress(path.read_bytes()))["settings"]["workload"] == "anns"


def test_a_result_without_steps_does_not_serve_where_steps_are_wanted(tmp_path: Path) -> None:
    store, wanted = CellStore(tmp_path), settings()
    store.write(made_result(wanted))
    assert store.find(wanted) is not None
    assert store.find(wanted, with_steps=True) is None
    kept = store.write(made_result(wanted, with_steps=True))
    assert store.find(wanted) == kept
    assert len(list(store.read_all())) == 1


def test_the_key_changes_with_settings_and_with_the_content_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one")
    before = settings(workload=str(trace))
    key = cell_key(before)
    assert cell_key(before) == key
    assert cell_key(replace(before, seed=2)) != key
    trace.write_text("two")
    assert cell_key(before) != key


def test_a_folder_holds_one_clock(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(made_result(settings()))
    store.check_clock("virtual")
    with pytest.raises(ConfigurationError, match="mix virtual and wall time"):
        store.check_clock("wall")
    store.write(made_result(settings(clock="wall", profile=None)))
    with pytest.raises(ConfigurationError, match="mix virtual and wall time"):
        list(store.read_all())


def test_a_folder_that_cannot_be_created_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cells").touch()
    with pytest.raises(ConfigurationError, match="cells cannot be created: File exists"):
        CellStore(tmp_path).write(made_result(settings()))


def test_an_empty_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no results"):
        list(CellStore(tmp_path / "none").read_all())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file"):
        CellStore(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"{}"), gzip.compress(b'{"format":"other/1"}')],
    ids=["empty", "not gzip", "no format", "other format"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    store = CellStore(tmp_path)
    whole = store.write(made_result(settings()))
    whole.write_bytes(content)
    with pytest.raises(ConfigurationError, match=whole.name):
        list(store.read_all())
    with pytest.raises(ConfigurationError, match=whole.name):
        read_cell(whole)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = CellStore(tmp_path).write(made_result(settings()))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigurationError, match="is not the result of a cell"):
        read_cell(path)
