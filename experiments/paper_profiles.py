"""Make a hardware profile of the latency profiles of Stream2LLM's artifact (github.com/rajveerb/stream2llm).

    .venv/bin/python experiments/paper_profiles.py RECOMPUTE_FILE [SWAP_FILE] --output profile.json

The two kinds of file:

    {"recomputation_latencies": {"16": [ms, ...], "32": [...], ...}, "metadata": {...}}
    {"swap_in_latency": {"16": [ms, ...], ...}, "swap_out_latency": {...}, "metadata": {...}}

Keys are numbers of tokens, in powers of two from one KV block on. The swaps of all workers are in one list. A recompute
latency is that of one step without context, so latencies above `max_num_batched_tokens` are of fewer tokens and are
left out. The files have neither the capacity of the KV cache nor the bytes of a block; `KV_BYTES_PER_TOKEN` has the
latter.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from streamrag.engine.costs.copy_costs import CopyCosts, CopyPoint
from streamrag.engine.costs.profile_files import load_profile, read_object, save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag_bench.profile.curve_fit import fit_copies, fit_table

RECOMPUTE, SWAP_IN, SWAP_OUT, METADATA = "recomputation_latencies", "swap_in_latency", "swap_out_latency", "metadata"
SHARED = ("model_name", "tensor_parallel_size")
"""Keys of the metadata whose values must be the same in both files of a pair."""
KV_BYTES_PER_TOKEN = {"llama-3.1-8b": 131_072, "llama-3.1-70b": 327_680}
"""KV bytes per token of 16-bit models, by the beginning of their names."""
NUM_FITTED = 3
"""Costs of a step that are fitted: of the step, of a token, and of a pair of tokens."""


def is_paper_profile(values: Mapping[str, Any]) -> bool:
    """Whether `values` has a key of one of the two kinds of file."""
    return bool({RECOMPUTE, SWAP_IN, SWAP_OUT} & values.keys())


def read_paper_profile(name: str, files: Sequence[Mapping[str, Any]]) -> TableProfile:
    """Return the profile that a file of recompute latencies describes, with copies if there is one of swap latencies.

    :raises ValueError: there is not one recompute file and at most one swap file, or they are wrong or do not match.
    """
    recompute = [values for values in files if RECOMPUTE in values]
    swap = [values for values in files if {SWAP_IN, SWAP_OUT} & values.keys()]
    if len(recompute) != 1:
        raise ValueError(f'one file must have "{RECOMPUTE}", and {len(recompute)} have; give FILE or FILE,SWAP_FILE')
    if len(swap) > 1 or any(not is_paper_profile(values) for values in files):
        raise ValueError("beside it there can be one file of swap latencies, and nothing else")
    metadata = _metadata(recompute[0])
    for key in SHARED if swap else ():
        ours, theirs = metadata.get(key), _metadata(swap[0]).get(key)
        if ours != theirs:
            raise ValueError(f"{key} is {ours!r} in the recompute file and {theirs!r} in that of swapping")
    latencies = _latencies(recompute[0], RECOMPUTE)
    points, pair_s = _fit_steps(latencies, metadata.get("max_num_batched_tokens"))
    block_size, num_ranks = min(latencies), metadata.get("tensor_parallel_size", 1)
    return TableProfile(
        name=name,
        device=f"unknown; {metadata.get('model_name', 'unknown model')}, profiled with Stream2LLM's artifact",
        points=points,
        pair_s=pair_s,
        request_s=0.0,
        kv_tokens=0,
        block_size=block_size,
        tensor_parallel_size=num_ranks,
        copies=_copies(swap[0], block_size, block_size * _kv_bytes_per_token(metadata) // num_ranks) if swap else None,
        provenance={"source": "latency profiles of Stream2LLM's artifact, arXiv 2604.16395", **metadata},
    )


def _metadata(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file's metadata, empty if there are none; raise ValueError if they are no object."""
    metadata = values.get(METADATA, {})
    if not isinstance(metadata, dict):
        raise ValueError(f'its "{METADATA}" is {metadata!r}, not an object')
    return metadata


def _latencies(values: Mapping[str, Any], name: str) -> dict[int, list[float]]:
    """Return all measured seconds by number of tokens, from the table `name` in ms; raise ValueError if it is wrong."""
    measured = values.get(name)
    if not isinstance(measured, dict) or not measured:
        raise ValueError(f'its "{name}" is missing or empty; it must have latencies in ms by numbers of tokens')
    latencies = {}
    for num_tokens, all_ms in measured.items():
        is_list = isinstance(all_ms, list) and all_ms
        if not num_tokens.isdecimal() or not is_list or not all(isinstance(ms, int | float) for ms in all_ms):
            raise ValueError(f'"{name}" has {num_tokens!r}: {all_ms!r}, not latencies in ms by a number of tokens')
        latencies[int(num_tokens)] = [ms / 1e3 for ms in all_ms]
    return latencies


def _fit_steps(
    latencies: Mapping[int, Sequence[float]], budget: int | None
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return a base line, never falling, and a pair's seconds (0 if few points), of the medians up to `budget`, if any.
    Raise ValueError for fewer than two."""
    seconds = {num: median(all_s) for num, all_s in sorted(latencies.items()) if budget is None or num <= budget}
    if len(seconds) < 2:
        raise ValueError(f'"{RECOMPUTE}" has {len(seconds)} numbers of tokens up to a step of {budget}; two are needed')
    pair_s = 0.0
    if len(seconds) > NUM_FITTED:
        measured = [([(num, 0)], step_s) for num, step_s in seconds.items()]
        pair_s = fit_table(measured, [min(seconds), max(seconds)]).own_pair_s
    base = accumulate((step_s - pair_s * num * num / 2 for num, step_s in seconds.items()), max)
    return tuple((float(num), step_s) for num, step_s in zip(seconds, base, strict=True)), pair_s


def _kv_bytes_per_token(metadata: Mapping[str, Any]) -> int:
    """Return the KV bytes per token of the model that is named, by its prefix; raise ValueError if unknown."""
    name = str(metadata.get("model_name")).rpartition("/")[2].lower()
    for prefix, num_bytes in KV_BYTES_PER_TOKEN.items():
        if name.removeprefix("meta-").startswith(prefix):
            return num_bytes
    raise ValueError(f"how large the KV of model {name!r} is, is not known; give the recompute file alone")


def _copies(values: Mapping[str, Any], block_size: int, block_bytes: int) -> CopyCosts:
    """Return the costs of copies fitted to a file's latencies by tokens, in blocks of `block_size` tokens."""

    def points(name: str) -> tuple[CopyPoint, ...]:
        return fit_copies({num // block_size: seconds for num, seconds in _latencies(values, name).items()})

    return CopyCosts(points(SWAP_OUT), points(SWAP_IN), block_bytes, is_overlapped=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the files, and write the profile, which `load_profile` checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parsed = parser.parse_args(arguments)
    save_profile(read_paper_profile(parsed.files[0].stem, [read_object(file) for file in parsed.files]), parsed.output)
    load_profile(str(parsed.output))


if __name__ == "__main__":
    main()
