"""StreamServe's ablation in kind: its arms on simulated engines, beside what it published.

    python experiments/streamserve.py [--json FILE]

80 queries of each of four datasets, on four A800 with Llama 2 7B: two pairs of a prefill and a decode lane, four
engines that do both, or one engine on all four. Every arm answers the same queries with answers of the same lengths:
233 tokens on average, which are the latency over the time per token of the published tensor-parallel baseline. The
paper names no lengths. The prompts have the mean lengths that follow from its own definition of throughput for
StreamServe's rows: throughput x latency - latency / time per token. Lengths vary about these means, and are simulated
to the token. Tables are in Markdown.

Fitted: the overhead of a step, to the time per token of the two baselines. Assumed: acceptance rates, and bandwidths.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from lane_play import Way, play
from results_file import write_results
from routing.loads import Pieces, Query
from simulated_lanes import LaneOptions
from study_figures import decimal, study_table

from streamrag.engine.costs.step_profiles import AnalyticProfile, ModelShape
from streamrag_bench.summary import percentile

NUM_QUERIES = 80
"""Of each dataset."""
AT_ONCE = (1, 16, 64)
"""Queries that are open at once. The paper sweeps them, and does not say what its tables have; latencies level off at
about 15 in its figure 4a."""
USUAL_AT_ONCE = 16
NUM_ANSWER = 233
"""Mean."""
VARIED = 0.6
"""Standard deviation of the logarithm of an answer's length. Assumed."""
PROMPTS_VARIED = 0.4
"""As `VARIED`, of a prompt's length."""
LOADS = (*((at_once, VARIED) for at_once in AT_ONCE), (USUAL_AT_ONCE, 0.0))
"""(queries at once, deviation of answers): the last one has answers of one length."""
BUDGET = 2_048
SHORT_ANSWER = 18
"""Tokens that the published latency of the whole system has room for: .275 s at .0153 s each."""
MICRO_BATCH = 16
"""Requests that a load of 1 stands for: of the paper's `b_micro`, at its baseline depth."""
KV_BYTES_PER_TOKEN = 524_288
NVLINK, PCIE = 200e9, 25e9
"""Bytes per second: an A800's NVLink in one direction, and PCIe 4.0, for the standard transfer without NIXL."""
OVERHEAD_S = {1: 0.0073, 4: 0.0124}
"""Seconds of a step besides reading and computing, by GPUs of the engine: fitted, see above."""
MODEL = ModelShape("Llama-2-7B", 6.74e9, 32, 32, 128, 13.48e9, KV_BYTES_PER_TOKEN)


class Published(NamedTuple):
    """A row of the paper's tables 3 to 9: tokens a second, seconds of a query, seconds per token of its answer."""

    tokens_per_s: float
    latency_s: float
    tpot_s: float

    @property
    def most_answer(self) -> float:
        """Tokens of an answer for which the latency has room, were there neither a queue nor a prompt."""
        return self.latency_s / self.tpot_s

    @property
    def num_tokens(self) -> float:
        """Tokens of the prompt and the answer, by the paper's equation 19."""
        return self.tokens_per_s * self.latency_s


class Dataset(NamedTuple):
    """`acceptance` is of a drafted token whose predecessors were right. Assumed, around the .71 that vLLM expects of
    EAGLE-3 on MT-Bench: more for code and mathematics, as EAGLE-2 reports, and less for summaries."""

    name: str
    num_prompt: int  # mean
    acceptance: float


DATASETS = (
    Dataset("ALPACA", 21, 0.71),
    Dataset("GSM8K", 60, 0.75),
    Dataset("HUMANEVAL", 115, 0.80),
    Dataset("SUM", 651, 0.65),
)
PUBLISHED_DATASETS = {
    "ALPACA": (Published(63, 8.2, 0.01624), Published(171, 3.4, 0.01512), Published(137, 0.3, 0.01529)),
    "GSM8K": (Published(68, 8.1, 0.01625), Published(241, 3.5, 0.01512), Published(264, 0.3, 0.01531)),
    "HUMANEVAL": (Published(78, 8.3, 0.01624), Published(210, 3.6, 0.01512), Published(639, 0.2, 0.01532)),
    "SUM": (Published(135, 9.1, 0.01722), Published(327, 3.6, 0.01512), Published(2_235, 0.3, 0.0153)),
}
"""Data-parallel and tensor-parallel vLLM, and StreamServe: tables 3 to 6."""


@dataclass(frozen=True)
class Arm:
    """A configuration of four GPUs. `acceptance` replaces that of all datasets."""

    name: str
    way: Way
    rule: str = "none"
    published: Published | None = None
    num_answer: int = NUM_ANSWER
    acceptance: float | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of each engine."""
        return 4 // self.way.num_engines


PAIRS = Way("pairs", 4, 2, NVLINK, KV_BYTES_PER_TOKEN, "FlowGuard")
FOUR, ONE = Way("both", 4, router="FlowGuard"), Way("both", 1)
SPECUSTREAM = "SpecuStream"
PUBLISHED_ALL = Published(814, 0.275, 0.0153)
ARMS = (
    Arm("StreamServe, all of it", PAIRS, SPECUSTREAM, PUBLISHED_ALL),
    Arm("round robin", replace(PAIRS, router="round robin"), SPECUSTREAM, Published(520, 1.15, 0.01542)),
    Arm("no SpecuStream", PAIRS, "none", Published(310, 2.45, 0.01525)),
    Arm("monolithic: one engine", ONE, SPECUSTREAM, Published(290, 3.52, 0.01518)),
    Arm("monolithic: four engines", FOUR, SPECUSTREAM),
    Arm("no NIXL", replace(PAIRS, link_bytes_s=PCIE), SPECUSTREAM, Published(765, 0.45, 0.01533)),
    Arm("no FlowGuard: random", replace(PAIRS, router="random"), SPECUSTREAM, Published(490, 1.3, 0.0154)),
    Arm("not adaptive: depth 5", PAIRS, "fixed 5", Published(680, 0.88, 0.01531)),
    Arm("neither FlowGuard nor drafts", replace(PAIRS, router="random"), "none", Published(220, 4.1, 0.0152)),
    Arm("four engines, no drafts (DP)", replace(FOUR, router="round robin"), "none", Published(86, 8.43, 0.01649)),
    Arm("one engine, no drafts (TP)", ONE, "none", Published(237, 3.53, 0.01512)),
    Arm("TP, depth 3", ONE, "fixed 3", Published(298, 2.85, 0.01508)),
    Arm("TP, depth 5", ONE, "fixed 5", Published(342, 2.41, 0.01505)),
    Arm("TP, depth 7", ONE, "fixed 7", Published(318, 2.62, 0.0151)),
    Arm("our lanes: soonest, depth 5", replace(PAIRS, layout="lanes", router="soonest"), "fixed 5"),
    Arm("one prefill, three decode lanes", replace(PAIRS, layout="lanes", num_prefill=1, router="soonest"), "fixed 5"),
    Arm("four engines, depth 5", replace(FOUR, router="soonest"), "fixed 5"),
    Arm("bound: every draft right, 20", PAIRS, "fixed 20", acceptance=1.0),
    Arm("all of it, answers of 18 tokens", PAIRS, SPECUSTREAM, num_answer=SHORT_ANSWER),
    Arm("no SpecuStream, 18 tokens", PAIRS, "none", num_answer=SHORT_ANSWER),
)
"""The arms of tables 8 and 9, with the paper's mean over all datasets; and some of ours."""


@dataclass(frozen=True)
class Row:
    """An arm with one dataset. Seconds."""

    arm: str
    dataset: str
    at_once: int
    sigma: float
    tokens_per_s: float  # as the paper counts: a query's mean tokens, prompt and answer, over the mean latency
    latency_s: float
    p99_s: float
    tpot_s: float
    answer_tokens_per_s: float  # of all queries together
    accepted_share: float


def profile(num_gpus: int) -> AnalyticProfile:
    """Return the profile of Llama 2 7B on so many A800 with 40 GB."""
    return AnalyticProfile(
        name=f"a800-llama2-7b-tp{num_gpus}",
        device=f"{num_gpus} x NVIDIA A800 40 GB",
        tensor_parallel_size=num_gpus,
        model=MODEL,
        peak_flops=312e12,
        efficiency=0.58,
        bandwidth_bytes_per_s=1.555e12,
        overhead_s=OVERHEAD_S[num_gpus],
        # nine tenths of the memory, without the weights and 2 GB of activations on each GPU
        kv_tokens=int((num_gpus * (0.9 * 40 * 2**30 - 2e9) - MODEL.weight_bytes) / KV_BYTES_PER_TOKEN),
    )


def lengths(mean: float, sigma: float, rng: random.Random) -> list[int]:
    """Return a log-normal length for each query, in a random order: quantiles, which have this mean to half a token.

    Lengths that are drawn independently do not: the mean of 80 answers was up to 14 % off.
    """
    normal = statistics.NormalDist()
    quantiles = [math.exp(sigma * normal.inv_cdf((n + 0.5) / NUM_QUERIES)) for n in range(NUM_QUERIES)]
    rng.shuffle(quantiles)
    return [round(mean * each / statistics.mean(quantiles)) for each in quantiles]


def queries_of(dataset: Dataset, num_answer: int, sigma: float, seed: int = 1) -> list[Query]:
    """Return queries that share nothing. `sigma`: standard deviation of the logarithm of an answer's length, of which
    the mean is `num_answer`."""
    rng, named = random.Random(f"{dataset.name} {seed}"), Pieces()
    prompts = lengths(dataset.num_prompt, PROMPTS_VARIED, rng)
    answers = lengths(num_answer, sigma, rng)
    named_prompts = (named(number, num) for number, num in enumerate(prompts))
    return [Query(0.0, ((0.0, (prompt,)),), num) for prompt, num in zip(named_prompts, answers, strict=True)]


def run(arm: Arm, dataset: Dataset, at_once: int, sigma: float) -> Row:
    """Play one dataset on one arm."""
    acceptance = dataset.acceptance if arm.acceptance is None else arm.acceptance
    options = LaneOptions(profile(arm.num_gpus), BUDGET, arm.rule, acceptance, MICRO_BATCH, block_size=1)
    queries = queries_of(dataset, arm.num_answer, sigma)
    outcome = play(queries, replace(arm.way, num_at_once=at_once), options)
    latencies_s = [timing.last_s for timing in outcome.timings]
    return Row(
        arm=arm.name,
        dataset=dataset.name,
        at_once=at_once,
        sigma=sigma,
        tokens_per_s=sum(t.num_prompt + t.num_answer for t in outcome.timings) / sum(latencies_s),
        latency_s=statistics.mean(latencies_s),
        p99_s=percentile(latencies_s, 0.99),
        tpot_s=statistics.mean(timing.per_token_s for timing in outcome.timings),
        answer_tokens_per_s=sum(timing.num_answer for timing in outcome.timings) / outcome.seconds,
        accepted_share=outcome.num_right / max(outcome.num_drafted, 1),
    )


def mean_of(rows: Sequence[Row], arm: str, at_once: int, sigma: float) -> Row:
    """Return the mean over all datasets, as in the paper's tables 8 and 9."""
    these = [row for row in rows if (row.arm, row.at_once, row.sigma) == (arm, at_once, sigma)]
    names = [each.name for each in fields(Row) if each.type is float and each.name != "sigma"]
    means = {name: statistics.mean(getattr(row, name) for row in these) for name in names}
    return replace(these[0], dataset="all", **means)


# --------------------------------------------------------------------------------------------------------------- tables


def work_table() -> str:
    """Return how many tokens a query of each published row can have had: an answer's at most + a prompt's."""
    lines = [[name, *map(_room, of)] for name, of in PUBLISHED_DATASETS.items()]
    return study_table(("", "data parallel", "tensor parallel", "StreamServe"), lines)


def room_table() -> str:
    """Return the same for the published rows of the ablation."""
    return study_table(
        ("arm", "answer at most + prompt"), ([arm.name, _room(arm.published)] for arm in ARMS if arm.published)
    )


def _room(row: Published) -> str:
    return f"{row.most_answer:.0f} + {row.num_tokens - row.most_answer:.0f}"


def ablation_table(rows: Sequence[Row]) -> str:
    """Return the published means beside ours, and latencies over that of the whole system."""
    whole, lines = mean_of(rows, ARMS[0].name, USUAL_AT_ONCE, VARIED), []
    for arm in ARMS:
        ours, theirs = mean_of(rows, arm.name, USUAL_AT_ONCE, VARIED), arm.published
        published = ["-", ""]
        if theirs:
            published = [_published(theirs), f"{theirs.latency_s / PUBLISHED_ALL.latency_s:.3g}"]
        accepted = f"{100 * ours.accepted_share:.0f} %" if ours.accepted_share else ""
        lines.append([arm.name, *published, _ours(ours), decimal(ours.latency_s / whole.latency_s), accepted])
    figures = "tokens/s, s, ms/token"
    return study_table(("arm", f"published: {figures}", "x", f"ours: {figures}", "x", "drafts that hold"), lines)


def load_table(rows: Sequence[Row]) -> str:
    """Return mean latencies in seconds and answer tokens a second, by queries at once; last, answers of one length."""
    lines = []
    for arm in ARMS:
        of = [mean_of(rows, arm.name, *load) for load in LOADS]
        lines.append([arm.name, *(f"{decimal(row.latency_s)}, {row.answer_tokens_per_s:,.0f}" for row in of)])
    names = [f"{at_once}" if sigma else f"{at_once}, answers of one length" for at_once, sigma in LOADS]
    return study_table(("arm", *names), lines)


def short_table(rows: Sequence[Row]) -> str:
    """Return each dataset's published row of the whole system beside ours with answers of 18 tokens."""
    arm = next(arm.name for arm in ARMS if arm.num_answer == SHORT_ANSWER)
    ours = {row.dataset: row for row in rows if (row.arm, row.at_once, row.sigma) == (arm, USUAL_AT_ONCE, VARIED)}
    figures = "tokens/s, s, ms/token"
    head = ("all of it", f"published: {figures}", f"ours with answers of {SHORT_ANSWER} tokens")
    return study_table(head, ([name, _published(of[2]), _ours(ours[name])] for name, of in PUBLISHED_DATASETS.items()))


def _published(row: Published) -> str:
    return f"{row.tokens_per_s:,g}, {decimal(row.latency_s, 3)}, {decimal(1e3 * row.tpot_s, 1)}"


def _ours(row: Row) -> str:
    return f"{row.tokens_per_s:,.0f}, {decimal(row.latency_s, 3)}, {decimal(1e3 * row.tpot_s, 1)}"


def report(rows: Sequence[Row]) -> str:
    """Return all tables, with a title each."""
    at_once = f"{USUAL_AT_ONCE} queries at once"
    tables = {
        f"Tables 8 and 9, {at_once}; answers of {NUM_ANSWER} tokens on average": ablation_table(rows),
        "Mean latency in seconds and answer tokens a second, by queries at once": load_table(rows),
        "Tokens of a query by the paper's own definitions": work_table(),
        "The same for its ablation": room_table(),
        f"Short answers, {at_once}": short_table(rows),
    }
    return "\n".join(f"## {title}\n\n{each}" for title, each in tables.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rows = [run(arm, dataset, *load) for arm, dataset, load in product(ARMS, DATASETS, LOADS)]
    print(report(rows))
    if arguments.json:
        write_results(arguments.json, rows, command="make bench-lanes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
