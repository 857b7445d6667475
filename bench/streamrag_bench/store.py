"""A store of cell results in a folder, from which an interrupted benchmark resumes."""

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamrag.backends.vllm.version import DISTRIBUTIONS
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import (
    MAX_FILE_BYTES,
    DecompressedFile,
    as_dataclass,
    parse_json,
    read_bytes,
    split_lines,
)
from streamrag.support.files import write_atomic
from streamrag.support.versions import __version__, installed_versions
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.grid import GENERATED, variant_name, workload_name

FORMAT = "streamrag-cell/1"
FINISHED = "[!.]*.json.gz"
"""Pattern of finished files. Files that are being written are hidden."""


def cell_key(settings: CellSettings) -> str:
    """Return 16 hexadecimal digits of a hash of settings, versions, and the workload's and the profile's files.

    Of a model, only the name or path is in the hash.
    """
    depends_on = {
        "format": FORMAT,
        "settings": asdict(settings),
        "streamrag": __version__,
        "vllm": _version_of_vllm(),
        "files": [_hash_of(p) for p in (settings.workload, settings.profile) if p and p not in GENERATED],
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]


def _version_of_vllm() -> str | None:
    """Return the version of vLLM, of whichever distribution; None if none is installed."""
    return next(iter(installed_versions(*DISTRIBUTIONS).values()), None)


def _hash_of(path: str) -> str | None:
    """Return a hash of a file's content, or of a folder's names and sizes; None if there is no such path."""
    digest = hashlib.sha256()
    try:
        if os.path.isdir(path):
            for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
                digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        else:
            with open(path, "rb") as file_object:
                digest = hashlib.file_digest(file_object, "sha256")
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _slug(settings: CellSettings) -> str:
    """Return a readable prefix for a cell's file name; it need not be unique."""
    qps = "" if settings.qps is None else f"-{settings.qps:g}qps"
    name = f"{workload_name(settings.workload)}-{variant_name(settings)}{qps}-seed{settings.seed}"
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:100]


class CellStore:
    """A store of results below `folder / "cells"`, with one gzipped JSON file per cell.

    A folder holds results of one clock: virtual and wall time cannot be compared.

    :raises ConfigurationError: `folder` is a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{folder} is a file; --output names a folder")

    def path(self, settings: CellSettings, *, with_steps: bool = False) -> Path:
        """Return the path of the cell's result file, which may not exist."""
        steps = ".steps" if with_steps else ""
        return self.cells / f"{_slug(settings)}-{cell_key(settings)}{steps}.json.gz"

    def find(self, settings: CellSettings, *, with_steps: bool = False) -> Path | None:
        """Return the result file of the cell, or None if it has not finished."""
        candidates = [self.path(settings, with_steps=True)] + ([] if with_steps else [self.path(settings)])
        return next((path for path in candidates if path.exists()), None)

    def write(self, result: CellResult) -> Path:
        """Write a result atomically, and return its `path`. A result with steps has another path than one without.

        :raises ConfigurationError: the file cannot be written.
        """
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{self.cells} cannot be created: {error.strerror or error}") from error
        path = self.path(result.settings, with_steps=bool(result.steps))
        values = asdict(result)
        header = {
            "format": FORMAT,
            "streamrag": __version__,
            "vllm": _version_of_vllm(),
            "settings": values["settings"],
        }
        # One JSON value, with the settings on its first line: results are large, and `read_all` needs these first.
        text = f'{_compact(header)[:-1]},\n"result":{_compact(values)}}}\n'
        write_atomic(path, gzip.compress(text.encode(), compresslevel=5, mtime=0))
        return path

    def read_all(self) -> Iterator[CellResult]:
        """Yield all results, read one at a time; for settings that were run twice, the newest.

        :raises ConfigurationError: there is no result, a file is damaged, or the results have different clocks.
        """
        newest: dict[CellSettings, Path] = {}
        for path in sorted(self.cells.glob(FINISHED), key=lambda path: path.lstat().st_mtime_ns):
            newest[_read_settings(path)] = path
        if not newest:
            raise ConfigurationError(f"{self.folder} holds no results of cells; `streamrag bench simulate` makes some")
        self.check_clock(next(iter(newest)).clock)
        for path in newest.values():
            yield read_cell(path)

    def check_clock(self, clock: str) -> None:
        """Raise ConfigurationError if a result in the folder has another clock."""
        if {_read_settings(path).clock for path in self.cells.glob(FINISHED)} - {clock}:
            raise ConfigurationError(
                f"{self.folder} would mix virtual and wall time, which cannot be compared; give another --output"
            )


def _compact(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def _read_settings(path: Path) -> CellSettings:
    """Read the settings on a result file's first line; raise ConfigurationError if there are none."""
    with _explained(path):
        first = next(split_lines(DecompressedFile(path)), b"")
        header = parse_json(first.rstrip().removesuffix(b",") + b"}")
        return as_dataclass(CellSettings, header["settings"])


def read_cell(path: Path) -> CellResult:
    """Read a result file; raise ConfigurationError if it is missing, damaged or of another `FORMAT`."""
    with _explained(path):
        values = parse_json(read_bytes(path, MAX_FILE_BYTES))
        if values["format"] != FORMAT:
            raise ConfigurationError(
                f"{path} has the format {str(values['format'])[:40]!r}; this streamrag reads {FORMAT!r}"
            )
        return as_dataclass(CellResult, values["result"])


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Translate errors of reading a result file in the block to ConfigurationError with a remedy."""
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        remedy = "remove it, and run the benchmark again"
        raise ConfigurationError(f"{path} is not the result of a cell ({error!r}); {remedy}") from error
