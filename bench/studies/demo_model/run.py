"""How many of 40 questions does the demo's model answer rightly, and cite rightly? On the real engine.

    python -m studies.demo_model.run [--model FOLDER | --untaught] [--dtype D] [--only SETTING] [--questions N]
                                  [--docs FOLDER] [--json FILE] [--keep FOLDER]

The questions are about streamrag's own documentation, which the model was not taught on; what is retrieved for each is
what an index of it gives, by keywords, vectors and late interaction as in `make demo`, or by vectors alone. An answer
is right if it has the words that it must contain, as whole words, and cites rightly if the first number in it is that
of a passage with these words. Every setting answers all questions, not streaming. The best by one half of the questions
is then asked in both ways, one after another: tokens must be equal. The other half is the test. With `--only "2
sentences"` nothing is chosen, and that setting is asked in both ways: minutes instead of most of an hour. `--keep` uses
what an earlier run made, also if the documentation has changed since: the model, indexes, what was retrieved and the
answers of each setting that was finished. So a run that was stopped goes on there. Of the answers that were not
streamed, asked one at a time, it also says how long the prompt took and how many tokens came in a second. `--untaught`
asks the model that `streamrag demo-model --untaught` makes.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag import (
    Chunk,
    HybridSource,
    Pipeline,
    PromptTemplate,
    SamplingParams,
    Update,
    UpdateMode,
    VectorSource,
    VllmBackend,
    build_index,
)
from streamrag.demo.demo_folder import TEMPLATE, build_site
from streamrag.support.files import write_atomic
from streamrag.telemetry import Answer
from streamrag.testing import ScriptedSource, Step, make_demo_model
from streamrag_bench.provenance import versions
from studies.documentation_questions import QUESTIONS
from studies.folders import DOCS

DEFAULT = PromptTemplate()
TERSE = PromptTemplate(
    system="Answer with one sentence of the documents, and its number in brackets.",
    before_context="",
    passage="[{number}] {title}\n{text}\n\n",
)
UNNUMBERED = PromptTemplate(
    system="Answer the question in one sentence, from the text.", before_context="", passage="{title}\n{text}\n\n"
)
MAX_TOKENS = 80
CITED = re.compile(r"\[(\d+)\]")
GAP_S = 0.2
"""Between the updates of a search that streams."""

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

console = Console(highlight=False, width=None if Console().is_terminal else 120)


Search = tuple[int, bool, int | None]


@dataclass(frozen=True)
class Setting:
    """What the model is given."""

    name: str
    k: int
    passage_words: int
    template: PromptTemplate = DEFAULT
    best_last: bool = False
    by_vectors: bool = False
    """Alone, and not by keywords, vectors and late interaction."""
    sentences: int | None = None
    """The best so many of the `k` passages, in place of these."""
    is_stable: bool = False
    """Passages that survive an update of the search stay where they are."""

    @property
    def search(self) -> "Search":
        """Settings that share it retrieve the same, but for how many."""
        return self.passage_words, self.by_vectors, self.k if self.sentences else None


SETTINGS = (
    Setting("2 sentences", 2, 60, TEMPLATE, sentences=2),
    Setting("3 sentences", 2, 60, TEMPLATE, sentences=3),
    Setting("4 sentences", 2, 60, TEMPLATE, sentences=4),
    Setting("3 sentences of 3 passages", 3, 60, TEMPLATE, sentences=3),
    Setting("2 sentences, default template", 2, 60, sentences=2),
    Setting("2 short passages, as sentences are asked", 2, 60, TEMPLATE),
    Setting("5 long passages", 5, 180),
    Setting("3 long passages", 3, 180),
    Setting("5 short passages", 5, 60),
    Setting("5 short passages, stable order", 5, 60, is_stable=True),
    Setting("3 short passages", 3, 60),
    Setting("2 short passages", 2, 60),
    Setting("3 short passages, by vectors alone", 3, 60, by_vectors=True),
    Setting("5 passages of 30 words", 5, 30),
    Setting("3 short passages, best last", 3, 60, best_last=True),
    Setting("3 short passages, terse", 3, 60, TERSE),
    Setting("3 short passages, not numbered", 3, 60, UNNUMBERED),
)


@dataclass(frozen=True)
class Row:
    """One answer."""

    question: str
    is_held_out: bool
    has_words: bool
    """Whether any passage of the context has the words: the best that the model can do."""
    is_right: bool
    is_cited: bool
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    ttft_after_retrieval_s: float | None = None
    decode_s: float | None = None
    """From the first token to the last."""


def plain(text: str) -> str:
    """Small letters, without what Markdown adds."""
    return " ".join(text.replace("`", "").replace("*", "").lower().split())


def has_words(text: str, words: Sequence[str]) -> bool:
    """Whether all are there, each as a whole: "plot" is not in "matplotlib"."""
    return all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", plain(text)) for word in words)


def row(question: str, answer: Answer) -> Row:
    words = QUESTIONS[question]
    passages = {citation.number: citation.text for citation in answer.citations}
    cited = [int(number) for number in CITED.findall(answer.text)]
    is_right = has_words(CITED.sub("", answer.text), words)
    return Row(
        question,
        bool([*QUESTIONS].index(question) % 2),
        any(has_words(text, words) for text in passages.values()),
        is_right,
        is_right and bool(cited) and all(has_words(passages.get(number, ""), words) for number in cited[:1]),
        answer.text,
        answer.token_ids,
        answer.num_prompt_tokens,
        answer.timings.ttft_after_retrieval_s,
        answer.timings.total_s - answer.timings.ttft_s,
    )


def steps(chunks: tuple[Chunk, ...]) -> Iterator[Step]:
    """A search that refines its result: fewer passages first, then some of them in another order."""
    yield Update(chunks[:1])
    yield GAP_S
    yield Update((*chunks[:1], *reversed(chunks[1:])))
    yield GAP_S
    yield Update(chunks)


Found = dict[str, list[tuple[Chunk, ...]]]
"""For each question what the search updated its result to; the last is what it found."""


async def retrieve(folder: Path, docs: Path, settings: Sequence[Setting], asked: Sequence[str]) -> dict[Search, Found]:
    """For each search and each question, what the index gives at last."""
    build_site(docs, folder / "site")
    most = max(setting.k for setting in SETTINGS)
    found: dict[Search, Found] = {}
    for search in {setting.search: None for setting in settings}:
        words, by_vectors, k_narrowed = search
        kept = folder / f"found-{words}-{by_vectors}-{k_narrowed}-{len(asked)}.json"
        if kept.exists():
            found[search] = {
                question: [tuple(Chunk(**fields) for fields in chunks) for chunks in updates]
                for question, updates in json.loads(kept.read_text()).items()
            }
            continue
        index = folder / str(words)
        if not index.exists():
            with console.status(f"indexing passages of {words} words"):
                await asyncio.to_thread(build_index, folder / "site", index, passage_words=words)
        found[search] = {}
        if by_vectors:
            source: VectorSource | HybridSource = VectorSource(index, k=most)
        else:
            sentences = max(setting.sentences or 0 for setting in SETTINGS) if k_narrowed else None
            source = HybridSource(index, k=k_narrowed or most, reranker="late-interaction", sentences=sentences)
        async with aclosing(source):
            await source.start(lambda line: None)
            for question in asked:
                async with aclosing(source.stream(question)) as events:
                    found[search][question] = [event.chunks async for event in events if isinstance(event, Update)]
        as_json = {
            question: [[asdict(chunk) for chunk in chunks] for chunks in updates]
            for question, updates in found[search].items()
        }
        write_atomic(kept, json.dumps(as_json))
    return found


async def ask(
    backend: VllmBackend,
    setting: Setting,
    found: Found,
    *,
    overlap: bool,
    at_once: int,
    bar: Callable[[], None],
) -> list[Row]:
    """All questions in one setting."""

    def plan(question: str) -> Iterator[Step]:
        if setting.is_stable:
            return iter([Update(chunks[: setting.k]) for chunks in found[question]])
        chunks = found[question][-1][: setting.sentences or setting.k]
        return steps(chunks[::-1] if setting.best_last else chunks)

    params = SamplingParams(max_tokens=MAX_TOKENS)
    limit = asyncio.Semaphore(at_once)
    mode = UpdateMode(order="stable" if setting.is_stable else "rank")
    source = ScriptedSource(plan)
    async with Pipeline(source, backend, mode=mode, owns_backend=False, template=setting.template) as pipeline:

        async def one(question: str) -> Row:
            async with limit:
                if at_once == 1:
                    await backend.reset_prefix_cache()
                stream = pipeline.stream(question, params=params, overlap=overlap)
                async with stream as chunks:
                    async for _ in chunks:
                        pass
                bar()
                assert stream.result is not None
                return row(question, stream.result)

        return list(await asyncio.gather(*(one(question) for question in found)))


def table_of(results: dict[str, list[Row]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for heading in ("prompt tokens", "words retrieved", "right", "right and cited", "of these, not for choosing"):
        table.add_column(heading, justify="right")
    for name, rows in results.items():
        held_out = [r for r in rows if r.is_held_out]
        table.add_row(
            name,
            f"{sum(r.num_prompt_tokens for r in rows) / len(rows):.0f}",
            f"{sum(r.has_words for r in rows)}",
            f"{sum(r.is_right for r in rows)} of {len(rows)}",
            f"{sum(r.is_cited for r in rows)} of {len(rows)}",
            f"{sum(r.is_cited for r in held_out)} of {len(held_out)}",
        )
    return table


def chosen(results: dict[str, list[Row]]) -> str:
    """The setting with most answers cited rightly in the half that is for choosing; of several, the first."""
    return max(results, key=lambda name: sum(r.is_cited for r in results[name] if not r.is_held_out))


class Asking:
    """Settings on an engine that starts with the first one whose answers `folder` does not have."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, found: dict[Search, Found]) -> None:
        self._folder = folder
        self._found = found
        self._engine = {"model": str(arguments.model), "dtype": arguments.dtype}
        self._backend = VllmBackend(
            arguments.model, max_model_len=8192, kv_cache_bytes=1 << 30, engine_args={"dtype": arguments.dtype}
        )
        self._open = AsyncExitStack()
        self._is_started = False

    async def __aenter__(self) -> "Asking":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._open.aclose()

    async def rows(self, setting: Setting, *, overlap: bool, at_once: int) -> list[Row]:
        found = self._found[setting.search]
        asked = repr((setting, overlap, at_once, self._engine, found))
        kept = self._folder / f"answers-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
        if not kept.exists():
            if not self._is_started:
                with console.status("starting the engine"):
                    await self._open.enter_async_context(aclosing(self._backend))
                    await self._backend.start(lambda line: None)
                self._is_started = True
            with Progress(*COLUMNS, console=console, transient=True) as progress:
                task = progress.add_task(setting.name, total=len(found))
                rows = await ask(
                    self._backend, setting, found, overlap=overlap, at_once=at_once, bar=lambda: progress.advance(task)
                )
            write_atomic(kept, json.dumps([asdict(each) for each in rows]))
        return [Row(**each | {"token_ids": tuple(each["token_ids"])}) for each in json.loads(kept.read_text())]


def retrieved(found: dict[Search, Found]) -> dict[str, list[int]]:
    """For each search, how many questions have their words in the first of what it found, the first two, and so on."""
    return {
        f"{k} passages of {words} words, as sentences"
        if k
        else f"passages of {words} words{', by vectors alone' * by_vectors}": [
            sum(
                any(has_words(chunk.text, QUESTIONS[question]) for chunk in updates[-1][:first])
                for question, updates in each.items()
            )
            for first in range(1, 6)
        ]
        for (words, by_vectors, k), each in found.items()
    }


def seconds(rows: Sequence[Row]) -> dict[str, float]:
    """What prompts and tokens took, asked one at a time after retrieval."""
    waits = [row.ttft_after_retrieval_s for row in rows if row.ttft_after_retrieval_s is not None]
    decoding_s = sum(row.decode_s or 0.0 for row in rows)
    return {
        "num_prompt_tokens": statistics.mean(row.num_prompt_tokens for row in rows),
        "ttft_after_retrieval_s": statistics.median(waits),
        "tokens_per_s": sum(len(row.token_ids) - 1 for row in rows) / decoding_s,
    }


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = [s for s in SETTINGS if not arguments.only or s.name in arguments.only]
    found = await retrieve(folder, arguments.docs, settings, [*QUESTIONS][: arguments.questions])
    results: dict[str, list[Row]] = {}
    async with Asking(folder, arguments, found) as asking:
        for setting in settings if len(settings) > 1 else ():
            results[setting.name] = await asking.rows(setting, overlap=False, at_once=8)
            console.print(f"{setting.name}: {sum(r.is_cited for r in results[setting.name])}")
        best = next(s for s in settings if s.name == chosen(results)) if results else settings[0]
        both = [await asking.rows(best, overlap=overlap, at_once=1) for overlap in (True, False)]
    results = results or {best.name: both[1]}
    num_equal = sum(a.token_ids == b.token_ids for a, b in zip(*both, strict=True))
    return {
        "settings": results,
        "chosen": best.name,
        "streaming": both[0],
        "waiting": both[1],
        "num_equal": num_equal,
        "retrieved": retrieved(found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="FOLDER", help="another model than `streamrag demo-model` makes")
    which.add_argument("--untaught", action="store_true", help="what `streamrag demo-model --untaught` makes")
    parser.add_argument("--dtype", default="float32", metavar="D", help="of the engine (%(default)s)")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", action="append", choices=names, metavar="SETTING", help=f"of {'; '.join(names)}")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, metavar="FOLDER", help="the documentation of another version"
    )
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N", help="only the first N")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of what is made and answered, for the next run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the answers")
    arguments = parser.parse_args()
    pages = {
        path.name: plain(path.read_text()) for path in sorted(arguments.docs.glob("*.md")) if path.name != "api.md"
    }
    for question, words in QUESTIONS.items():
        assert any(has_words(text, words) for text in pages.values()), f"no page answers {question!r} any more"
    with tempfile.TemporaryDirectory(prefix="streamrag-") as temporary:
        folder = arguments.keep or Path(temporary)
        if arguments.model is None:
            arguments.model = folder / ("model-untaught" if arguments.untaught else "model")
            if not arguments.model.exists():
                make_demo_model(arguments.model, taught=not arguments.untaught)
        measured = asyncio.run(measure(arguments, folder))
    for one in measured["streaming"]:
        mark = "[green]cited[/]" if one.is_cited else "[yellow]right[/]" if one.is_right else "[red]wrong[/]"
        console.print(f"{mark} {one.question}")
        console.print(f"      {' '.join(one.text.split())}", markup=False)
    console.print(table_of(measured["settings"], f"{arguments.questions} questions, {arguments.dtype}"))
    console.print(table_of({measured["chosen"]: measured["streaming"]}, "chosen by one half, and asked streaming"))
    console.print(f"streaming and not, the same tokens: {measured['num_equal']} of {arguments.questions}")
    for search, counts in measured["retrieved"].items():
        console.print(f"{search}: the words are in the first 1 to {len(counts)} for {', '.join(map(str, counts))}")
    took = seconds(measured["waiting"])
    console.print(
        f"{measured['chosen']}, one at a time: prompts of {took['num_prompt_tokens']:.0f} tokens in "
        f"{took['ttft_after_retrieval_s']:.2f} s (median), then {took['tokens_per_s']:.1f} tokens a second"
    )
    if arguments.json:
        told = ["python -m studies.demo_model.run", *(f'--only "{name}"' for name in arguments.only or ())]
        as_json = {
            "command": " ".join([*told, *["--untaught"] * arguments.untaught]),
            "date": date.today().isoformat(),
            "versions": versions(),
            "dtype": arguments.dtype,
            "chosen": measured["chosen"],
            "num_equal": measured["num_equal"],
            "retrieved": measured["retrieved"],
            "seconds": took,
            "settings": {name: [asdict(r) for r in rows] for name, rows in measured["settings"].items()},
            "streaming": [asdict(r) for r in measured["streaming"]],
            "waiting": [asdict(r) for r in measured["waiting"]],
        }
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    # In another dtype than float32 two tokens may tie: docs/backends.md#exactness.
    return 0 if measured["num_equal"] == arguments.questions or arguments.dtype != "float32" else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
