"""DiskANN and IVF with 100,000 vectors: build time, memory, recall by stage; and on a disk that was made slow.

    python -m studies.index_size.run DOCUMENTS [--json FILE] [--slow]

DOCUMENTS is a folder of text, Markdown or HTML, such as the HTML archive from docs.python.org. 20,480 of its passages
of at most 60 words are embedded with all-MiniLM-L6-v2, once: minutes to an hour, kept in `bench-results/`. 200 of them
are the queries. The others are the real vectors of the index; what is missing to 100,000 is THOSE REPEATED WITH NOISE
of length 0.35, which serves for size, and makes neighbours nearer than they are in real text.

With `--slow` (root, Linux, control groups of version 1), the indexes are copied to a file system on a loop device that
the kernel holds to 500 reads and 40 MiB a second. DiskANN reads past the page cache; for IVF the cache is emptied
before each query. That is an index far larger than memory on a disk that others use too.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from streamrag.sources.documents.file_worker import file_worker
from streamrag.sources.index import diskann, inverted_lists
from streamrag.sources.index.document_passages import find_documents, read_documents
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER, Embedder, find_embedder
from streamrag.sources.index.index_folder import (
    IVF,
    MANIFEST,
    PASSAGES,
    Manifest,
    describe_files,
    passage_line,
    with_title,
)
from streamrag.support.versions import installed_versions
from studies.folders import KEPT

NUM_REAL, NUM_QUERIES, NUM_VECTORS, NUM_SLOW_QUERIES = 20_480, 200, 100_000, 30
PASSAGE_WORDS, NOISE, K = 60, 0.35, 10
LENGTHS = tuple(2 * K << stage for stage in range(5))
PROBES = (4, 8, 16, 32, 64)
KINDS = ("diskann", "ivf")
READS_PER_S, BYTES_PER_S = 500, 40 << 20
NUM_THREADS = min(8, os.cpu_count() or 1)
BLKIO = Path("/sys/fs/cgroup/blkio")
MADV_DONTNEED = 4

console = Console()


def embed(documents: Path, work: Path) -> tuple[list[str], Any]:
    """Lines of `passages.jsonl` and their vectors, from `work` as far as they are there."""
    place = find_embedder(DEFAULT_EMBEDDER)
    passages, vectors = work / PASSAGES, work / "vectors.f32"
    if not passages.exists():
        work.mkdir(parents=True, exist_ok=True)
        lines = dict.fromkeys(_lines(documents))  # each once
        rows = np.linspace(0, len(lines) - 1, NUM_REAL).astype(int)
        passages.write_text("".join([*lines][row] for row in rows))
    lines_kept = passages.read_text().splitlines()
    row_bytes = 4 * 384
    num_done = vectors.stat().st_size // row_bytes if vectors.exists() else 0
    if num_done < len(lines_kept):
        os.environ.update(place.env)
        embedder = Embedder(place.location, place.name, num_threads=NUM_THREADS, device=None)
        texts = [with_title(fields["title"], fields["text"]) for fields in map(json.loads, lines_kept)]
        with vectors.open("ab") as file:
            file.truncate(num_done * row_bytes)
            for first in track(range(num_done, len(texts), 512), "embedding"):
                file.write(embedder.passages(texts[first : first + 512]).tobytes())
                file.flush()
    return lines_kept, np.fromfile(vectors, np.float32).reshape(len(lines_kept), -1)


def _lines(documents: Path) -> Iterator[str]:
    paths, _ = find_documents(documents, max_file_bytes=10 << 20, leave_out=documents / ".none")
    with file_worker() as read, Progress() as progress:
        task = progress.add_task("reading", total=len(paths))

        def report(num_done: int) -> None:
            progress.update(task, completed=num_done)

        for document in read_documents(documents, paths, [], PASSAGE_WORDS, report, read):
            for number, text in enumerate(document.passages):
                yield passage_line({"uri": document.uri, "title": document.title, "passage": number, "text": text})


def prepare(lines: list[str], vectors: Any, work: Path) -> None:
    """The vectors of the index and the queries, as files for the processes that build and search."""
    chance = np.random.default_rng(0)
    is_query = np.zeros(len(vectors), bool)
    is_query[chance.choice(len(vectors), NUM_QUERIES, replace=False)] = True
    real, queries = vectors[~is_query], vectors[is_query]
    source = np.arange(NUM_VECTORS) % len(real)
    every = real[source]
    noise = chance.standard_normal(every.shape, np.float32)
    noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    every[len(real) :] += noise[len(real) :]
    every /= np.linalg.norm(every, axis=1, keepdims=True)
    np.save(work / "every.npy", every)
    np.save(work / "queries.npy", queries)
    exact = np.argsort(-(queries @ every.T), axis=1, kind="stable")[:, :K]
    np.save(work / "exact.npy", exact)
    kept = [line for line, query in zip(lines, is_query, strict=True) if not query]
    with (work / "lines.jsonl").open("w") as file:
        file.writelines(f"{kept[row]}\n" for row in source)


# -------------------------------------------------------------------------------------- in a process of its own each


def build(kind: str, work: Path) -> dict[str, Any]:
    """The index of this kind in `work/kind`."""
    out = work / kind
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    vectors = np.load(work / "every.npy", mmap_mode="r")
    before_bytes = _status("VmHWM")
    started_s = time.perf_counter()
    made: dict[str, Any] = {}
    if kind == "ivf":
        made["num_lists"] = inverted_lists.build_lists(out, vectors, NUM_THREADS, None)
    else:
        diskann.build_graph(out, vectors, NUM_THREADS)
    build_s = time.perf_counter() - started_s
    cpu_s = time.process_time()
    peak_bytes = _status("VmHWM") - before_bytes
    shutil.copy(work / "lines.jsonl", out / PASSAGES)
    files = describe_files(out)
    manifest = Manifest(
        kind="ivf" if kind == "ivf" else "diskann",
        created=datetime.now(UTC),
        embedder=DEFAULT_EMBEDDER,
        dimension=vectors.shape[1],
        probe=(),
        num_documents=1,
        num_passages=len(vectors),
        passage_words=PASSAGE_WORDS,
        packages={},
        files=files,
        **made,
    )
    (out / MANIFEST).write_text(manifest.model_dump_json())
    size_bytes = sum(entry.size_bytes for name, entry in files.items() if name != PASSAGES)
    return {"build_s": build_s, "build_cpu_s": cpu_s, "peak_bytes": peak_bytes, "size_bytes": size_bytes, **made}


def measure(kind: str, folder: Path, work: Path, is_slow: bool) -> dict[str, Any]:
    """Time and recall of each stage, and the memory of a searcher without its embedder."""
    if is_slow:
        (BLKIO / "streamrag-slow" / "cgroup.procs").write_text(str(os.getpid()))
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    options: dict[str, Any] = {"manifest_sha256": "", "location": "", "embedder": "", "probe": []}
    options |= {"folder": str(folder), "num_passages": manifest.num_passages, "dimension": manifest.dimension}
    queries, exact = np.load(work / "queries.npy"), np.load(work / "exact.npy")
    before_bytes = _status("RssAnon")
    stages: list[dict[str, Any]]
    if kind == "ivf":
        assert manifest.num_lists
        searcher: Any = inverted_lists.FaissSearcher(num_lists=manifest.num_lists, **options)
        ends = (*PROBES, manifest.num_lists)
        stages = [{"after": after, "until": until} for after, until in pairwise([0, *ends])]
    else:
        searcher = diskann.DiskAnnSearcher(**options)
        stages = [{"complexity": length} for length in LENGTHS]
    opened = searcher._open_index()
    num_queries = NUM_SLOW_QUERIES if is_slow else NUM_QUERIES
    times = np.zeros((num_queries, len(stages)))
    right, is_final = np.zeros_like(times), np.zeros_like(times)
    for number in range(num_queries):
        if is_slow and kind == "ivf":
            _forget(folder / IVF)
        results = []
        best: list[tuple[float, int]] = []
        for place, stage in enumerate(stages):
            options = {"nearer_than": best[-1][0] if len(best) == K else None} if kind == "ivf" else {}
            started_s = time.perf_counter()
            ids, distances = searcher._search(opened, queries[number], k=K, **stage, **options)
            times[number, place] = time.perf_counter() - started_s
            found = list(zip(distances, ids, strict=True))
            best = sorted([*best, *found])[:K] if kind == "ivf" else found
            results.append([each for _, each in best])
            right[number, place] = len({*results[-1]} & {*exact[number].tolist()}) / K
        is_final[number] = [result == results[-1] for result in results]
    memory_bytes, mapped_bytes = _status("RssAnon") - before_bytes, _status("RssFile")
    names = [*map(str, LENGTHS)] if kind == "diskann" else [*map(str, PROBES), f"all {manifest.num_lists}"]
    rows = [
        {
            "stage": name,
            "stage_p50_s": float(np.median(times[:, place])),
            "since_start_p50_s": float(np.median(times[:, : place + 1].sum(1))),
            "recall_at_10": float(right[:, place].mean()),
            "final": float(is_final[:, place].mean()),
        }
        for place, name in enumerate(names)
    ]
    return {"stages": rows, "memory_bytes": memory_bytes, "mapped_bytes": mapped_bytes, "num_queries": num_queries}


def _status(name: str) -> int:
    """Bytes, of this process."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _forget(path: Path) -> None:
    """Give back what is mapped of a file, and what the page cache has of it."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            madvise(first, last - first, MADV_DONTNEED)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------------------- the whole


def in_process(*arguments: str) -> Any:
    """What this file prints when it is run with these arguments, as its last line."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def slow_disk(work: Path) -> Iterator[Path]:
    """A folder on a loop device that is held to so many reads and bytes a second, for processes of one group."""
    image, mounted, group = work / "disk.img", work / "slow", BLKIO / "streamrag-slow"
    with image.open("wb") as file:
        file.truncate(2 << 30)
    command = SimpleNamespace(run=lambda *words: subprocess.run(words, check=True, capture_output=True, text=True))
    device = command.run("losetup", "-f", "--show", str(image)).stdout.strip()
    try:
        command.run("mkfs.ext4", "-q", device)
        mounted.mkdir(exist_ok=True)
        command.run("mount", device, str(mounted))
        try:
            number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
            group.mkdir(exist_ok=True)
            (group / "blkio.throttle.read_iops_device").write_text(f"{number} {READS_PER_S}")
            (group / "blkio.throttle.read_bps_device").write_text(f"{number} {BYTES_PER_S}")
            yield mounted
        finally:
            command.run("umount", str(mounted))
            group.rmdir()
    finally:
        command.run("losetup", "-d", device)
        image.unlink()


def show(title: str, found: dict[str, Any]) -> None:
    """The table of one measurement."""
    table = Table("lists" if "all" in found["stages"][-1]["stage"] else "L", title=title)
    for heading in ("stage ms", "since start ms", "recall@10", "top 10 as the last stage has it"):
        table.add_column(heading, justify="right")
    for row in found["stages"]:
        times = (f"{row[name] * 1e3:,.2f}" for name in ("stage_p50_s", "since_start_p50_s"))
        table.add_row(row["stage"], *times, f"{row['recall_at_10']:.3f}", f"{row['final']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, help="folder of documents, or build / measure for our own processes")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--work", type=Path, default=KEPT / "index-size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--slow", action="store_true", help="on a slow disk too; root only")
    arguments = parser.parse_args()
    if str(arguments.documents) in ("build", "measure"):
        kind, *paths = arguments.rest
        if str(arguments.documents) == "build":
            print(json.dumps(build(kind, Path(paths[0]))))
        else:
            print(json.dumps(measure(kind, Path(paths[0]), Path(paths[1]), bool(paths[2]))))
        return
    work: Path = arguments.work.absolute()
    lines, vectors = embed(arguments.documents, work)
    prepare(lines, vectors, work)
    result: dict[str, Any] = {
        "about": {
            "created": datetime.now(UTC).isoformat(),
            "num_vectors": NUM_VECTORS,
            "num_real_vectors": NUM_REAL - NUM_QUERIES,
            "num_vectors_repeated_with_noise": NUM_VECTORS - NUM_REAL + NUM_QUERIES,
            "noise": NOISE,
            "reads_per_s_when_slow": READS_PER_S,
            "bytes_per_s_when_slow": BYTES_PER_S,
            "num_cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "packages": installed_versions("streamrag", "diskannpy", "faiss-cpu", "numpy"),
        }
    }
    for kind in arguments.kinds:
        made = in_process("build", kind, str(work))
        found = in_process("measure", kind, str(work / kind), str(work), "")
        result[kind] = {"build": made, "disk": found}
        mib = {name: made[name] / 2**20 for name in ("peak_bytes", "size_bytes")}
        console.print(
            f"{kind}: built in {made['build_s']:.1f} s ({made['build_cpu_s']:.1f} s of computing), at most "
            f"{mib['peak_bytes']:.0f} MiB of memory, {mib['size_bytes']:.0f} MiB on disk; a searcher holds "
            f"{found['memory_bytes'] / 2**20:.0f} MiB, and {found['mapped_bytes'] / 2**20:.0f} MiB of files are mapped"
        )
        show(f"{kind}, as the disk is", found)
    if arguments.slow:
        with slow_disk(work) as mounted:
            for kind in arguments.kinds:
                folder = Path(shutil.copytree(work / kind, mounted / kind))
                os.sync()
                found = in_process("measure", kind, str(folder), str(work), "slow")
                result[kind]["slow_disk"] = found
                show(f"{kind}, disk held to {READS_PER_S} reads and {BYTES_PER_S >> 20} MiB a second", found)
                shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
