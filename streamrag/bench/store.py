"""Results of cells in a folder, so that a benchmark that was stopped goes on where it was."""

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
from streamrag.bench.cell import CellResult, CellSettings
from streamrag.bench.grid import GENERATED, variant_name, workload_name
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import (
    MAX_JSON_BYTES,
    Unpacked,
    as_dataclass,
    lines_of,
    open_regular,
    parse_json,
    read_bytes,
)
from streamrag.support.files import write_whole
from streamrag.support.versions import __version__, installed_versions

FORMAT = "streamrag-cell/1"
FINISHED = "[!.]*.json.gz"
"""Pattern of finished files. A hidden file is being written, or was when its process was killed."""


def cell_key(settings: CellSettings) -> str:
    """Hash all that a result depends on: settings, files that they name, and versions. 16 hexadecimal digits."""
    depends_on = {
        "format": FORMAT,
        "settings": asdict(settings),
        "streamrag": __version__,
        "vllm": _version_of_vllm(),
        "files": [_hash_of(p) for p in (settings.workload, settings.profile) if p and p not in GENERATED],
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]


def _version_of_vllm() -> str | None:
    return next(iter(installed_versions(*DISTRIBUTIONS).values()), None)


def _hash_of(path: str) -> str | None:
    """Hash a file's content, or a folder's names and sizes; None for what is no path, as a profile's name."""
    digest = hashlib.sha256()
    try:
        if os.path.isdir(path):
            for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
                digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        else:
            with open_regular(path) as file_object:
                digest = hashlib.file_digest(file_object, "sha256")
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _slug(settings: CellSettings) -> str:
    """Return the start of a file's name, for people; the hash after it is what counts."""
    qps = "" if settings.qps is None else f"-{settings.qps:g}qps"
    name = f"{workload_name(settings.workload)}-{variant_name(settings)}{qps}-seed{settings.seed}"
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:100]


class CellStore:
    """The results below `folder / "cells"`, one gzipped JSON file a cell.

    A folder holds results of one clock: virtual and wall time cannot be compared.

    :raises ConfigurationError: the folder is somebody else's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{folder} is a file; --output names a folder")

    def path(self, settings: CellSettings, *, with_steps: bool = False) -> Path:
        """Return where the cell's result is, or would be."""
        steps = ".steps" if with_steps else ""
        return self.cells / f"{_slug(settings)}-{cell_key(settings)}{steps}.json.gz"

    def find(self, settings: CellSettings, *, with_steps: bool = False) -> Path | None:
        """Return the file of the finished cell, or None."""
        candidates = [self.path(settings, with_steps=True)] + ([] if with_steps else [self.path(settings)])
        return next((path for path in candidates if path.exists()), None)

    def write(self, result: CellResult) -> Path:
        """Write a finished cell: the whole file, or nothing.

        :raises ConfigurationError: it cannot be written.
        """
        self.cells.mkdir(parents=True, exist_ok=True)
        path = self.path(result.settings, with_steps=bool(result.steps))
        values = result.as_dict()
        header = {
            "format": FORMAT,
            "streamrag": __version__,
            "vllm": _version_of_vllm(),
            "settings": values["settings"],
        }
        # One JSON value, whose first line alone tells what it is about: results are large.
        text = f'{_compact(header)[:-1]},\n"result":{_compact(values)}}}\n'
        write_whole(path, gzip.compress(text.encode(), compresslevel=5, mtime=0))
        return path

    def read_all(self) -> Iterator[CellResult]:
        """Yield one result at a time, because they are large; of settings that were run twice, the newest.

        :raises ConfigurationError: there is none, a file is broken, or virtual and wall time stand side by side.
        """
        newest: dict[CellSettings, Path] = {}
        for path in sorted(self.cells.glob(FINISHED), key=lambda path: path.lstat().st_mtime_ns):
            newest[_read_settings(path)] = path
        if not newest:
            raise ConfigurationError(f"{self.folder} holds no results of cells; `streamrag bench simulate` makes some")
        self._check_clocks({settings.clock for settings in newest})
        for path in newest.values():
            yield read_cell(path)

    def check_clock(self, clock: str) -> None:
        """Refuse a clock that the folder's results do not have."""
        self._check_clocks({clock, *(_read_settings(path).clock for path in self.cells.glob(FINISHED))})

    def _check_clocks(self, clocks: set[str]) -> None:
        if len(clocks) > 1:
            raise ConfigurationError(
                f"{self.folder} would mix virtual and wall time, which cannot be compared; give another --output"
            )


def _compact(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def _read_settings(path: Path) -> CellSettings:
    with _explained(path):
        header = parse_json(
            next(lines_of(iter(Unpacked(path, MAX_JSON_BYTES))), b"").rstrip().removesuffix(b",") + b"}"
        )
        return as_dataclass(CellSettings, header["settings"])


def read_cell(path: Path) -> CellResult:
    """Read the result in a file that `CellStore.write` made.

    :raises ConfigurationError: there is no such file, or it is something else.
    """
    with _explained(path):
        values = parse_json(read_bytes(path, MAX_JSON_BYTES))
        if values["format"] != FORMAT:
            raise ConfigurationError(
                f"{path} has the format {str(values['format'])[:40]!r}; this streamrag reads {FORMAT!r}"
            )
        return as_dataclass(CellResult, values["result"])


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        remedy = "remove it, and run the benchmark again"
        raise ConfigurationError(f"{path} is not the result of a cell ({error!r}); {remedy}") from error
