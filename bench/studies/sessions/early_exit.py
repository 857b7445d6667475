"""When a few answers are told apart, how many forward passes does the early exit save, and is its answer another?

    python -m studies.sessions.early_exit [--dtype D] [--model FOLDER] [--json FILE]

Sixty questions, half about log lines and half about what was said in a meeting, half of them yes-or-no and half with
three answers, in the prompts of a session, asked of the demo's model (SmolLM2, 135 M) on the real engine. The full
answer is the likeliest of those there may be, all of whose tokens were computed; a threshold takes one that leads by so
much in log-probability as it stands (`streamrag.sessions.answer`). A threshold's passes are among those of the full
answer, so each of them is computed once. Answers of one token take one pass in any case.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import AnswerChunk, Prompt, SamplingParams, VllmBackend
from streamrag.sessions.answer import ForwardPass, TokenIds, choose_answer, encode_answers
from streamrag.sessions.question_options import DECISIVE_MARGIN
from streamrag.support.files import write_atomic
from streamrag.testing import make_demo_model
from streamrag_bench.provenance import versions
from studies.sessions.arms import Text

THRESHOLDS = (0.5, 1.0, DECISIVE_MARGIN, 4.0, inf)
NUM_TEXTS = 5
"""Of each kind, with six questions each."""
SERVICES, LEVELS, PEOPLE = ("billing", "search", "login"), ("INFO", "WARNING", "ERROR"), ("Ana", "Ben", "Carla")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Question:
    """`expected` is the right one of `answers`."""

    kind: str
    lines: tuple[str, ...]
    text: str
    answers: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Answered:
    """At one threshold."""

    text: str
    num_passes: int


def log(rng: random.Random) -> list[Question]:
    lines, levels, times_ms = [], [], []
    most_ms = rng.choice([700, 1_400])
    for i in range(14):
        levels.append(rng.choice(LEVELS[: rng.choice([1, 3])]))
        times_ms.append(rng.randrange(20, most_ms))
        service = rng.choice(SERVICES)
        lines.append(f"09:{30 + i}:07 {service} {levels[-1]} request took {times_ms[-1]} ms")
    first, second, third = times_ms[-3:]
    trend = 0 if first < second < third else 1 if first > second > third else 2
    trends = ("rising all the time", "falling all the time", "neither of the two")
    most = max(LEVELS, key=levels.count)
    kept = tuple(lines)
    return [
        yes_or_no("log", kept, "Does any line say ERROR?", ("yes", "no"), is_so="ERROR" in levels),
        yes_or_no(
            "log",
            kept,
            "Is the newest line a warning?",
            ("yes, it is a warning", "no, it is not"),
            is_so=levels[-1] == "WARNING",
        ),
        yes_or_no(
            "log",
            kept,
            "Did any request take over 700 ms?",
            ("yes, one did", "no, none did"),
            is_so=max(times_ms) > 700,
        ),
        Question("log", kept, "Which service is in the newest line: billing, search or login?", SERVICES, service),
        Question("log", kept, "Which level is the most frequent: INFO, WARNING or ERROR?", LEVELS, most),
        Question("log", kept, "Are the last three times rising, falling or neither?", trends, trends[trend]),
    ]


def meeting(rng: random.Random) -> list[Question]:
    is_against, has_date, has_launch = (rng.random() < 0.5 for _ in range(3))
    states = ("approved by all", "refused for now", "still an open question")
    budgets = (
        "The budget is approved.",
        "We refuse the budget for now.",
        "Whether the budget is enough is still open.",
    )
    state, owner, last = rng.randrange(3), rng.choice(PEOPLE), rng.choice(PEOPLE)
    said = [
        "Thanks for coming, everybody.",
        "The office plants need water.",
        "Customers liked the new search.",
        "Let us go on with the next point.",
        "I read the report on the train.",
        budgets[state],
        "The launch went well, I think." if has_launch else "The offsite went well, I think.",
        "No, I disagree with that." if is_against else "Yes, I agree with that.",
        "We meet again on May 12." if has_date else "We should meet again some time.",
        f"{owner} writes the minutes and sends them.",
    ]
    rng.shuffle(said)
    lines = (*(f"{rng.choice(PEOPLE)}: {each}" for each in said), f"{last}: Goodbye.")
    owners = tuple(f"{name} writes them" for name in PEOPLE)
    return [
        yes_or_no("meeting", lines, "Was the launch mentioned?", ("yes", "no"), is_so=has_launch),
        yes_or_no("meeting", lines, "Did anybody disagree?", ("yes, somebody did", "no, nobody did"), is_so=is_against),
        yes_or_no(
            "meeting",
            lines,
            "Is there a date for the next meeting?",
            ("yes, there is", "no, there is none"),
            is_so=has_date,
        ),
        Question("meeting", lines, "Who spoke last: Ana, Ben or Carla?", PEOPLE, last),
        Question("meeting", lines, "Is the budget approved, refused or open?", states, states[state]),
        Question("meeting", lines, "Who writes the minutes?", owners, f"{owner} writes them"),
    ]


def yes_or_no(kind: str, lines: tuple[str, ...], text: str, answers: tuple[str, str], *, is_so: bool) -> Question:
    return Question(kind, lines, text, answers, answers[not is_so])


def questions() -> list[Question]:
    return [each for make in (log, meeting) for seed in range(NUM_TEXTS) for each in make(random.Random(seed))]


async def at_thresholds(answers: dict[TokenIds, str], one_pass: ForwardPass) -> list[Answered]:
    """The answer at each threshold; each pass is made once."""
    known: dict[TokenIds, tuple[int | None, Any]] = {}
    found = []
    for threshold in THRESHOLDS:
        num_passes = 0

        async def counted(begun: TokenIds, allowed: Sequence[int]) -> tuple[int | None, Any]:
            nonlocal num_passes
            num_passes += 1
            if begun not in known:
                known[begun] = await one_pass(begun, allowed)
            return known[begun]

        text = (await choose_answer(answers, counted, threshold)).text
        found.append(Answered(text, num_passes))
    return found


async def asked(backend: VllmBackend, question: Question) -> tuple[int, list[Answered]]:
    """How many tokens the full answer has, and what is answered at each threshold."""
    text = Text(backend.model)
    text.add(question.lines)
    token_ids = text.complete(question.text)

    async def one_pass(begun: TokenIds, allowed: Sequence[int]) -> tuple[int | None, Any]:
        async def prompts() -> AsyncIterator[Prompt]:
            yield Prompt(token_ids + begun, 0, is_complete=True)

        extra = {"allowed_token_ids": sorted(allowed), "logprob_token_ids": sorted(allowed)}
        chunks = [
            event
            async for event in backend.generate(prompts(), SamplingParams(max_tokens=1, extra=extra))
            if isinstance(event, AnswerChunk) and event.token_ids
        ]
        return chunks[0].token_ids[0], chunks[0].logprobs and chunks[0].logprobs[0]

    answers = encode_answers(backend.model.tokenizer, question.answers)
    found = await at_thresholds(answers, one_pass)
    (num_tokens,) = (len(each) for each, name in answers.items() if name == found[-1].text)
    return num_tokens, found


def rows(kind: str, asked_of: Sequence[tuple[Question, int, Sequence[Answered]]]) -> list[dict[str, Any]]:
    """One for each threshold; the last is the full answer's."""
    full_passes = sum(found[-1].num_passes for _, _, found in asked_of)
    table = []
    for i, threshold in enumerate(THRESHOLDS):
        num_passes = sum(found[i].num_passes for _, _, found in asked_of)
        table.append(
            {
                "kind": kind,
                "threshold": None if threshold == inf else threshold,
                "num_questions": len(asked_of),
                "num_answer_tokens": sum(num_tokens for _, num_tokens, _ in asked_of),
                "num_passes": num_passes,
                "saved": 1 - num_passes / full_passes,
                "num_same": sum(found[i].text == found[-1].text for _, _, found in asked_of),
                "num_right": sum(found[i].text == question.expected for question, _, found in asked_of),
            }
        )
    return table


def grouped(asked_of: Sequence[tuple[Question, int, Sequence[Answered]]]) -> list[dict[str, Any]]:
    groups = {
        "all": asked_of,
        **{kind: [each for each in asked_of if each[0].kind == kind] for kind in ("log", "meeting")},
        "yes or no": [each for each in asked_of if len(each[0].answers) == 2],
        "three answers": [each for each in asked_of if len(each[0].answers) == 3],
        "more than one pass": [each for each in asked_of if any(found.num_passes > 1 for found in each[2])],
    }
    return [row for name, of_group in groups.items() if of_group for row in rows(name, of_group)]


def show(table: Sequence[dict[str, Any]]) -> None:
    shown = Table(title="questions with a few answers, by the lead that is enough", title_justify="left")
    for name in ("questions", "number", "lead", "passes", "saved", "as in full", "right"):
        shown.add_column(name, justify="left" if name == "questions" else "right")
    for i, row in enumerate(table):
        lead = "full" if row["threshold"] is None else f"{row['threshold']:g}"
        of = row["num_questions"]
        shown.add_row(
            *(row["kind"], str(of), lead, str(row["num_passes"]), f"{row['saved']:.0%}"),
            *(f"{row['num_same']} of {of}", f"{row['num_right']} of {of}"),
            end_section=(i + 1) % len(THRESHOLDS) == 0,
        )
    console.print(shown)


async def measure(model: Path, dtype: str) -> list[dict[str, Any]]:
    backend = VllmBackend(model, max_model_len=2_048, engine_args={"dtype": dtype, "block_size": 32})
    await backend.start(lambda text: None)
    try:
        asked_of = [
            (question, *(await asked(backend, question)))
            for question in track(questions(), "asking", console=console, transient=True)
        ]
    finally:
        await backend.aclose()
    return grouped(asked_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", metavar="D", help="default: %(default)s")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of the demo's model, which is made anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_demo_model(Path(folder) / "model")
        table = asyncio.run(measure(model, arguments.dtype))
    show(table)
    if arguments.json:
        made = {
            "command": "make -C bench early-exit",
            "dtype": arguments.dtype,
            "versions": versions(),
            "results": table,
        }
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
