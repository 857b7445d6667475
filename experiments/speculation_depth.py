"""How many tokens of a draft should a step verify? Policies of speculation depth, real and simulated.

    python experiments/speculation_depth.py [--folder FOLDER] [--only PART ...] [--json FILE] [--plot FILE]

real        vLLM's engine core on this machine: the model of `make demo` answers questions about this documentation from
            five passages whose KV is in the prefix cache, 1, 4 and 16 at a time. The drafts are its answers from the
            first two and four passages; they are kept in --pairs, and made anew only if that is not there. All policies
            answer the same questions right after each other, in turning order.
simulated   on the profile of an H200, 1 to 256 at a time: the same answers and drafts, others that `make bench-answers`
            recorded of the same model, and made-up drafts.

`speculation_policies.py` has the policies, `speculation_engine.py` the engines. Tokens must be equal.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import exp, log
from pathlib import Path
from typing import Any

import anyio
from answer_ahead import NUM_PASSAGES, retrieve
from documentation_questions import QUESTIONS
from rich.console import Console
from rich.progress import track
from rich.table import Table
from speculation_engine import (
    MAX_MODEL_LEN,
    AnsweringEngine,
    Engine,
    Job,
    Played,
    RealEngine,
    learnt_cost,
    play,
    profile_cost,
    repeated,
)
from speculation_policies import ByPrice, DepthPolicy, Fixed, SpecuStream, policies

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.backends.vllm.client.arguments import NUM_DRAFT_TOKENS
from streamrag.demo.demo_folder import TEMPLATE, prepare_demo
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile
from streamrag.engine.drafts import AnswerDraft
from streamrag.modes.prompt import PromptAssembler
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions

PARTS = ("real", "simulated")
MAX_TOKENS = 64
NUM_DRAFT_PASSAGES = (2, 4)
REAL_STREAMS = {1: 4, 4: 8, 16: 16}
"""How many questions at a time, and in each round in all."""
SIMULATED_STREAMS = (1, 4, 16, 64, 256)
PROFILE = "h200-llama8b-tp2-sync"
BUDGET = 8_192
LEAST_JOBS = 240
RESULTS = Path(__file__).parent / "results"
ANSWERS = {
    "2 of 4 sentences": ("2 sentences", "4 sentences"),
    "3 of 5 long passages": ("3 long passages", "5 long passages"),
}
"""Settings of `make bench-answers`: of the draft, and of the answer."""
END = 2
MADE_UP, MADE_UP_FROM, WRONG_SHARE = "made up: 1 token in 10 is wrong", "3 of 5 long passages", 0.1
WRONG = 899
"""A token that no answer has; the tokens of prompts are above it, so that nothing is found in them."""
POSITIONS = (1, 2, 4, 8, 16, 32)

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass(frozen=True)
class Pair:
    """An answer and its draft, as token ids of the model."""

    question: int
    num_passages: int
    """From which the draft is."""
    num_prompt_tokens: int
    draft: tuple[int, ...]
    answer: tuple[int, ...]


# --------------------------------------------------------------------------------------------------------------- drafts


def prompts_of(folder: Path, num_questions: int) -> list[dict[int, tuple[int, ...]]]:
    """Return the complete prompts of each question, by the number of passages, which come in any order."""
    questions, rng = list(QUESTIONS)[:num_questions], random.Random(0)
    found, tokenizer = anyio.run(retrieve, folder, questions), HuggingFaceTokenizer(folder / "model")
    prompts = []
    for question in questions:
        chunks = rng.sample(found[question], len(found[question]))
        assembler = PromptAssembler(tokenizer, TEMPLATE, question, max_model_len=MAX_MODEL_LEN, max_tokens=MAX_TOKENS)
        assembled = {
            num: assembler.assemble(chunks[:num], is_complete=True, is_ranked=False)
            for num in (*NUM_DRAFT_PASSAGES, NUM_PASSAGES)
        }
        prompts.append({num: each.prompt.token_ids for num, each in assembled.items()})
    return prompts


def record_pairs(engine: Engine, prompts: Sequence[dict[int, tuple[int, ...]]], end: int) -> list[Pair]:
    """Have the model answer all prompts."""
    keys = [(question, num) for question, of_num in enumerate(prompts) for num in of_num]
    jobs = [Job(prompts[question][num], (), (), end, MAX_TOKENS) for question, num in keys]
    played = play(engine, Fixed(0), jobs, 16)
    answers = dict(zip(keys, (played.answers[number] for number in range(len(jobs))), strict=True))
    return [
        Pair(question, num, len(prompts[question][NUM_PASSAGES]), draft, answers[question, NUM_PASSAGES])
        for (question, num), draft in answers.items()
        if num != NUM_PASSAGES
    ]


def verifications(pair: Pair) -> Iterator[tuple[bool, int, int]]:
    """Yield, of each step that verifies up to 32 tokens: is it the first, the tokens proposed, and those right."""
    draft, num_shown, is_first = AnswerDraft(pair.draft, NUM_DRAFT_TOKENS), 1, True
    while num_shown < len(pair.answer):
        guesses = draft.next_tokens(pair.answer[:num_shown], NUM_DRAFT_TOKENS)
        following = pair.answer[num_shown:]
        num_right = next((i for i, (a, b) in enumerate(zip(guesses, following, strict=False)) if a != b), None)
        num_right = min(len(guesses), len(following)) if num_right is None else num_right
        if guesses:
            yield is_first, len(guesses), num_right
            is_first = False
        num_shown += num_right + 1


def acceptance(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return how much of the drafts is right: of those verified up to each position, how many held up to there."""
    steps = [step for pair in pairs for step in verifications(pair)]
    return {
        "num_pairs": len(pairs),
        "num_same": sum(pair.draft == pair.answer for pair in pairs),
        "num_wrong_at_once": sum(pair.draft[:1] != pair.answer[:1] for pair in pairs),
        "num_answer_tokens": sum(len(pair.answer) for pair in pairs),
        **{
            name: {
                str(position): [
                    sum(num_right >= position for first, n, num_right in steps if first == is_first and n >= position),
                    sum(first == is_first and n >= position for first, n, _ in steps),
                ]
                for position in POSITIONS
            }
            for name, is_first in (("first", True), ("again", False))
        },
    }


def recorded_drafts(path: Path) -> tuple[dict[str, list[Pair]], int]:
    """Return drafts by what they are based on, and the token that ends answers."""
    settings = json.loads((RESULTS / "answers.json").read_text())["settings"]
    found = {}
    for name, (fewer, all_) in ANSWERS.items():
        pairs = enumerate(zip(settings[fewer], settings[all_], strict=True))
        found[name] = [
            Pair(number, 0, b["num_prompt_tokens"], tuple(a["token_ids"]), tuple(b["token_ids"]))
            for number, (a, b) in pairs
        ]
    if not path.exists():
        return found, END
    pairs_, end = read_pairs(path)
    assert end == END
    of_num = {
        f"{num} of {NUM_PASSAGES} passages": [p for p in pairs_ if p.num_passages == num] for num in NUM_DRAFT_PASSAGES
    }
    return of_num | found, end


# ----------------------------------------------------------------------------------------------------------------- real


def measure(
    engine: Engine, prompts: Sequence[dict[int, tuple[int, ...]]], pairs: Sequence[Pair], end: int, minutes: float
) -> dict[str, Any]:
    """Play rounds for as many minutes, each with all policies."""
    rng, rows, steps = random.Random(1), [], defaultdict(list)
    jobs = [Job(prompts[p.question][NUM_PASSAGES], p.draft, p.answer, end, MAX_TOKENS) for p in pairs]
    play(engine, Fixed(0), [replace(job, draft=(), most_tokens=1) for job in jobs], 1)  # fills the prefix cache
    names, learnt = list(policies()), []
    end_s = time.monotonic() + 60 * minutes
    for number, (num_streams, num_jobs) in itertools.product(range(1_000), REAL_STREAMS.items()):
        if number and time.monotonic() > end_s:
            break
        chosen, first = list(repeated(jobs, num_jobs, rng)), number * len(REAL_STREAMS) % len(names)
        for name in [*names[first:], *names[:first]]:
            played = play(engine, policies()[name](), chosen, num_streams)
            rows.append(row_of(name, num_streams, number, chosen, played))
            for step in played.steps:
                steps[step.num_decoding, step.num_rows].append(step.seconds)
        context = statistics.median(len(job.prompt) for job in jobs)
        learnt.append(prices(engine, num_streams, context))
        console.print(f"round {number}, {num_streams} at a time")
    curve = [
        [num_decoding, num_rows, len(of), statistics.median(of)]
        for (num_decoding, num_rows), of in sorted(steps.items())
    ]
    return {"rows": rows, "steps": curve, "learnt": learnt}


def row_of(policy: str, num_streams: int, number: int, jobs: Sequence[Job], played: Played) -> dict[str, Any]:
    """Return what one policy gave in one round."""
    return {
        "policy": policy,
        "num_streams": num_streams,
        "round": number,
        "num_jobs": len(jobs),
        "num_equal": sum(played.answers[i] == job.answer for i, job in enumerate(jobs)),
        "num_tokens": played.num_tokens,
        "seconds": played.seconds,
        "tpot_s": statistics.mean(played.tpots_s),
        "latency_s": statistics.mean(played.latencies_s),
        "num_proposed": played.num_proposed,
        "num_accepted": played.num_accepted,
        "num_steps": len(played.steps),
        "planning_s": statistics.median(step.planning_s for step in played.steps),
    }


def prices(engine: Engine, num_streams: int, context: float) -> dict[str, Any]:
    """Return what one more row costs by what the scheduler has learnt, as a share of a step with one row a request."""
    cost = learnt_cost(engine)
    if cost is None:
        return {"num_streams": num_streams, "price": None}
    step = cost(num_streams, num_streams * context)
    return {"num_streams": num_streams, "price": cost(num_streams + 1, (num_streams + 1) * context) / step - 1}


# ------------------------------------------------------------------------------------------------------------ simulated


def simulated_jobs(drafts: Mapping[str, Sequence[Pair]], end: int) -> dict[str, list[Job]]:
    """Return the recorded answers with the recorded drafts and with made-up ones, in tokens of a small vocabulary."""
    found: dict[str, list[Job]] = defaultdict(list)
    for name, pairs in drafts.items():
        for pair in pairs:
            rng, ids = random.Random(len(found[name])), {end: 0}
            answer, draft = (tuple(ids.setdefault(t, len(ids)) for t in part) for part in (pair.answer, pair.draft))
            answer = answer if answer[-1] == 0 else (*answer, 0)  # it was cut at its most tokens
            prompt = tuple(rng.choices(range(WRONG + 1, 1_000), k=pair.num_prompt_tokens))
            found[name].append(Job(prompt, draft, answer, 0, len(draft) + len(answer)))
            wrong = tuple(WRONG if rng.random() < WRONG_SHARE else token for token in answer)
            if name == MADE_UP_FROM:
                found[MADE_UP].append(Job(prompt, wrong, answer, 0, len(draft) + len(answer)))
    return found


def simulate(drafts: Mapping[str, Sequence[Pair]], end: int) -> dict[str, Any]:
    """Answer three times as many questions as there are at a time, on an engine of its own for each policy."""
    profile = load_profile(PROFILE)
    assert isinstance(profile, AnalyticProfile)
    costs = profile_cost(profile)
    ways: dict[str, tuple[Callable[[], DepthPolicy], Any]] = {n: (make, None) for n, make in policies().items()}
    ways["by price, known costs"] = ByPrice, costs
    rows, learnt = [], []
    jobs_of = simulated_jobs(drafts, end)
    cells = list(itertools.product(jobs_of, SIMULATED_STREAMS))
    for name_of_drafts, num_streams in track(cells, "simulating", console=console, transient=True):
        jobs = jobs_of[name_of_drafts]
        chosen = list(repeated(jobs, max(3 * num_streams, LEAST_JOBS), random.Random(0)))
        context = statistics.mean(len(job.prompt) for job in jobs)
        true = costs(num_streams, num_streams * context)
        step, more = (true(num, num * context) for num in (num_streams, num_streams + 1))
        for name, (make, cost) in ways.items():
            engine = AnsweringEngine(profile, max_num_seqs=max(SIMULATED_STREAMS), budget=BUDGET)
            play(engine, Fixed(0), [replace(job, draft=(), most_tokens=1) for job in jobs], 16)
            played = play(engine, make(), chosen, num_streams, cost)
            rows.append({"drafts": name_of_drafts, **row_of(name, num_streams, 0, chosen, played)})
            if name in ("none", "by price"):
                known = {"drafts": name_of_drafts, "policy": name, "known": more / step - 1}
                learnt.append(known | prices(engine, num_streams, context))
    return {"profile": PROFILE, "budget": BUDGET, "rows": rows, "learnt": learnt}


# --------------------------------------------------------------------------------------------------------------- report


def specustream_depths() -> list[dict[str, Any]]:
    """Return the depth that SpecuStream settles at, before it is rounded down, mean and range over 40 steps."""
    found = []
    for name, acceptances in (
        *((f"constant {a}", (a,)) for a in (0.0, 0.2, 0.5, 0.8, 1.0)),
        ("0.4 and 0.6 in turn", (0.4, 0.6)),
        ("0 and 1 in turn", (0.0, 1.0)),
        ("five times 0, five times 1", (0.0,) * 5 + (1.0,) * 5),
    ):
        for load, tokens_per_s in ((0.0, 400.0), (0.9, 400.0), (0.0, 20.0)):
            policy = SpecuStream()
            depths = [policy.adapt(acceptances[i % len(acceptances)], load, tokens_per_s) for i in range(240)][-40:]
            found.append(
                {
                    "acceptance": name,
                    "load": load,
                    "tokens_per_s": tokens_per_s,
                    "mean": statistics.mean(depths),
                    "least": min(depths),
                    "most": max(depths),
                }
            )
    return found


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each policy and number of streams, its totals and the ratios to doubling in the same rounds."""
    cells: dict[tuple[str, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row.get("drafts", ""), row["num_streams"], row["policy"]].append(row)
    found = []
    for (drafts, num_streams, policy), these in cells.items():
        base = {row["round"]: row for row in cells[drafts, num_streams, "doubling"]}
        ratios = [
            (row["num_tokens"] / row["seconds"]) / (base[row["round"]]["num_tokens"] / base[row["round"]]["seconds"])
            for row in these
        ]
        total = {
            name: sum(row[name] for row in these)
            for name in ("num_jobs", "num_equal", "num_tokens", "seconds", "num_proposed", "num_accepted")
        }
        found.append(
            {
                "drafts": drafts,
                "num_streams": num_streams,
                "policy": policy,
                **total,
                "tokens_per_s": total["num_tokens"] / total["seconds"],
                "tpot_s": statistics.mean(row["tpot_s"] for row in these),
                "latency_s": statistics.mean(row["latency_s"] for row in these),
                "planning_s": statistics.median(row["planning_s"] for row in these),
                "ratio": exp(statistics.mean(map(log, ratios))),
                "least_ratio": min(ratios),
                "most_ratio": max(ratios),
            }
        )
    return found


def show(title: str, summary: Sequence[Mapping[str, Any]]) -> None:
    """Print a table: a row for each policy, a column for each number of streams."""
    for drafts in dict.fromkeys(row["drafts"] for row in summary):
        these = {(row["policy"], row["num_streams"]): row for row in summary if row["drafts"] == drafts}
        nums = sorted({num for _, num in these})
        table = Table(
            "tokens a second, of doubling, ms a token, accepted/proposed", *map(str, nums), title=f"{title} {drafts}"
        )
        for policy in dict.fromkeys(policy for policy, _ in these):
            cells = [these[policy, num] for num in nums]
            table.add_row(
                policy,
                *(
                    f"{c['tokens_per_s']:.0f} {c['ratio']:.2f} {1e3 * c['tpot_s']:.2f} "
                    f"{c['num_accepted']}/{c['num_proposed']}"
                    for c in cells
                ),
            )
        console.print(table)


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Write a PNG: tokens a second over those of no speculation, by the number of streams. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("two CPU cores", list(found["real"]["summary"]))] if "real" in found else []
    panels += [
        (f"H200 profile, {drafts}", [r for r in found["simulated"]["summary"] if r["drafts"] == drafts])
        for drafts in (MADE_UP_FROM, MADE_UP)
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.5))
    for axis, (title, rows) in zip(axes, panels, strict=True):
        of = {(row["policy"], row["num_streams"]): row["tokens_per_s"] for row in rows}
        nums = sorted({num for _, num in of})
        for policy in (
            "fixed 3",
            "fixed 7",
            "SpecuStream",
            "concurrency cap",
            "by batch size",
            "doubling",
            "by price",
            "oracle",
        ):
            style = {"by price": "o-", "doubling": "s-", "oracle": "k:"}.get(policy, ".--")
            axis.plot(nums, [of[policy, num] / of["none", num] for num in nums], style, label=policy)
        axis.set(xscale="log", xticks=nums, xticklabels=nums, title=title, xlabel="answers at a time")
        axis.axhline(1.0, color="grey", linewidth=0.5)
    axes[0].set_ylabel("tokens a second, over no drafts")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, default=Path(".demo"), help="that of `make demo` (%(default)s)")
    add("--questions", type=int, default=10, metavar="N", help="(%(default)s)")
    add("--minutes", type=float, default=4.0, metavar="M", help="for the rounds on the real engine (%(default)s)")
    add("--only", choices=PARTS, nargs="+", default=PARTS, help="what to do; the rest of --json is kept")
    add("--pairs", type=Path, default=RESULTS / "speculation_pairs.json", metavar="FILE", help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="where to put the numbers")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG there")
    arguments = parser.parse_args()
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    if "real" in arguments.only:
        found["real"] = run_real(arguments)
    drafts, end = recorded_drafts(arguments.pairs)
    found |= {"date": date.today().isoformat(), "versions": versions(), "specustream": specustream_depths()}
    found["acceptance"] = {name: acceptance(pairs) for name, pairs in drafts.items()}
    if "simulated" in arguments.only:
        found["simulated"] = simulate(drafts, end)
    for part in ("real", "simulated"):
        if "rows" in found.get(part, {}):
            found[part]["summary"] = summarize(found[part]["rows"])
        if part in found:
            show(part, found[part]["summary"])
    rows = [row for part in ("real", "simulated") for row in found.get(part, {}).get("summary", ())]
    found.get("simulated", {}).pop("rows", None)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, found)
    return 0 if all(row["num_equal"] == row["num_jobs"] for row in rows) else 1


def read_pairs(path: Path) -> tuple[list[Pair], int]:
    """Return the pairs, and the token that ends answers."""
    found = json.loads(path.read_text())
    return [Pair(**{**p, "draft": tuple(p["draft"]), "answer": tuple(p["answer"])}) for p in found["pairs"]], found[
        "end"
    ]


def run_real(arguments: argparse.Namespace) -> dict[str, Any]:
    """Record pairs, if there are none, and play them."""
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder)
    end = json.loads((arguments.folder / "model" / "generation_config.json").read_text())["eos_token_id"]
    prompts = prompts_of(arguments.folder, arguments.questions)
    num_tokens = sum(map(len, (ids for of_num in prompts for ids in of_num.values())))
    engine = RealEngine(arguments.folder / "model", max_num_seqs=16, kv_tokens=num_tokens + 16_384)
    try:
        if not arguments.pairs.exists():
            pairs = [asdict(pair) for pair in record_pairs(engine, prompts, end)]
            write_atomic(arguments.pairs, json.dumps({"end": end, "pairs": pairs}) + "\n")
        pairs_, _ = read_pairs(arguments.pairs)
        return measure(engine, prompts, pairs_, end, arguments.minutes)
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
