"""Streams a crawl, and a search by keywords, vectors and a reranker, into vLLM on CPU, and compares with not streaming.

At last it repeats a crawl, and shows an answer that is drafted before it ends.

Run it with `make demo`. By default it serves streamrag's own documentation on loopback, indexes it, and asks SmolLM2, a
model with 135 M parameters made by `streamrag demo-model`. It records what is retrieved for each question, gives it the
timing of real retrieval (see `demo_timing.py`), shows the first question as it happens, and then does what
`streamrag compare --trace` does: it asks in pairs until the intervals are narrow or time is over. Ctrl-C ends it, and
keeps what was measured. With `--tiny` the model is a small Llama with random weights: it is faster, and its answers are
noise.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_ahead import AheadPair, DraftDisplay, ask_ahead
from demo_timing import CRAWL, SEARCH, as_on_the_web, as_with_a_hosted_reranker
from rich.console import Console

from streamrag import (
    CrawlOptions,
    HybridSource,
    Pipeline,
    PromptTemplate,
    QueryOptions,
    ReplaySource,
    SamplingParams,
    Source,
    StreamRagError,
    TraceRecorder,
    VllmBackend,
    WebSource,
)
from streamrag.demo.demo_folder import (
    MAX_CONTEXT_TOKENS,
    MAX_MODEL_LEN,
    NUM_PASSAGES,
    NUM_SENTENCES,
    TEMPLATE,
    prepare_demo,
)
from streamrag.telemetry import (
    Answer,
    Answered,
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    QueryEvent,
    RetrievalCutShort,
)
from streamrag.testing import ScriptedBackend
from streamrag.trace import Trace, read_trace, write_trace
from streamrag_bench.compare.others_load import OthersLoad
from streamrag_bench.compare.pairs import FIRST_TOKEN, MIN_ROUNDS, AskedPair, ComparedGroup, ask_at_once, ask_rounds
from streamrag_bench.compare.picture import QueryRow, draw_queries
from streamrag_bench.compare.report import make_table
from streamrag_bench.compare.words import verdict, why_unclear

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = (
    "Why do embedding and searching run in a worker process?",
    "Which error refuses an index that another embedder made?",
    "How much does the whole ladder of a search cost?",
    "What happens when a page never ends or is too large?",
    "For which Python does diskannpy have wheels?",
)
"""Their answers stand in single sentences of pages that the crawl comes to. docs/demo-model.md tells how many such
questions the small model answers rightly."""

CITED = re.compile(r"\[(\d+)\]")

console = Console(highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="another model for vLLM")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, whose answers are noise")
    parser.add_argument("--url", metavar="URL", help="a real site to crawl")
    parser.add_argument("--index", metavar="FOLDER", help="a real index, made by `streamrag index build`")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="instead of the demo's; may be repeated")
    parser.add_argument(
        "--queries",
        type=int,
        metavar="N",
        help="pairs to measure per source; by default until the intervals are narrow",
    )
    parser.add_argument(
        "--minutes", type=float, default=1.5, metavar="M", help="per source, after which no pair begins (1.5)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer, at most (64)")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", metavar="FOLDER", help="where to put what is made")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> None:
    """Make the site, the index and the model that were not given, unless an earlier run made the same ones."""
    out: Path = arguments.out
    with console.status("making what the demo needs") as status:
        is_new = prepare_demo(
            out,
            model="tiny" if arguments.tiny else "smollm2" if arguments.model is None else None,
            on_step=lambda step, num_done, num_total: status.update(f"{step}, {num_done} of {num_total}"),
        )
    if is_new:
        console.print("made a site of the documentation, and a vector index of the same pages")
        if arguments.tiny:
            console.print("made a small Llama with random weights: it writes noise")
        elif arguments.model is None:
            console.print("made SmolLM2 of 135 M parameters: it is small, and often wrong")
    else:
        what = "the site and the index" if arguments.model else "the site, the index and the model"
        console.print(f"using {what} that an earlier run left in {out.name}/")


@asynccontextmanager
async def serve(site: Path) -> AsyncIterator[str]:
    """The address of the site, served from a process of its own."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("demo_site.py")),
        str(site),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C does not end it before the demo does
    )
    assert server.stdout
    try:
        port = int(await server.stdout.readline())
        yield f"http://127.0.0.1:{port}/index.html"
    finally:
        server.terminate()
        await server.wait()


async def record(source: Source, questions: Sequence[str], path: Path) -> Trace:
    """What the source retrieves for the questions, recorded in a new file."""
    async with Pipeline(source, ScriptedBackend(), recorder=TraceRecorder(path)) as pipeline:
        for question in (questions[0], *questions):  # the first search loads its models
            async with pipeline.stream(question) as stream:
                async for _ in stream:
                    pass
    trace = read_trace(path)
    return replace(trace, queries=trace.queries[1:])


async def record_all(arguments: argparse.Namespace, questions: Sequence[str]) -> None:
    """Record a crawl and a search of each question, with the timing of real ones unless the site or index is real."""
    out: Path = arguments.out
    for name in ("crawl", "search"):
        (out / f"{name}.jsonl").unlink(missing_ok=True)
    async with AsyncExitStack() as stack:
        url = arguments.url or await stack.enter_async_context(serve(out / "site"))
        options = CrawlOptions(max_pages=12, max_page_chars=1500, num_workers=1, allow_private=arguments.url is None)
        crawl = WebSource([url], options)
        index = arguments.index or out / "index"
        search = HybridSource(index, k=NUM_PASSAGES, reranker="late-interaction", sentences=NUM_SENTENCES)
        with console.status(f"crawling {url}"):
            pages = await record(crawl, questions, out / "crawl.jsonl")
        with console.status(f"searching {index}"):
            ranking = await record(search, questions, out / "search.jsonl")
    write_trace(pages if arguments.url else as_on_the_web(pages), out / "crawl.jsonl", overwrite=True)
    ranking = ranking if arguments.index else as_with_a_hosted_reranker(ranking)
    write_trace(ranking, out / "search.jsonl", overwrite=True)


async def compare(group: ComparedGroup, backend: VllmBackend, arguments: argparse.Namespace) -> None:
    """Ask both ways with the recorded retrieval, show the first question as it happens, and print the answers."""
    questions = questions_of(arguments)
    trace = arguments.out / f"{group.name}.jsonl"
    options = options_of(arguments)
    async with Pipeline(ReplaySource(trace, delay=0.01), backend, owns_backend=False) as pipeline:
        await ask_at_once(pipeline, questions[:1], options)  # the first query of an engine takes longer
    console.print(f"1. {questions[0]}")
    async with Pipeline(ReplaySource(trace), backend, owns_backend=False) as pipeline:
        with console.status("asking both ways") as status:
            async for (pair,) in ask_rounds(
                pipeline,
                questions,
                options,
                group,
                most_s=60 * arguments.minutes,
                most_rounds=arguments.queries,
                on_event=show,
            ):
                status.update(f"pair {len(group.rounds)}: {seconds_of(pair)}")
    for number, pair in enumerate(group.pairs[: len(questions)]):
        console.print(f"{number + 1}. {pair.question}\n   {seconds_of(pair)}")
        print_answer(pair.answers[0])


def questions_of(arguments: argparse.Namespace) -> Sequence[str]:
    return [*(arguments.ask or QUESTIONS)][: arguments.queries]


def options_of(arguments: argparse.Namespace) -> QueryOptions:
    return {
        "params": SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=arguments.tiny),
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "template": PromptTemplate() if arguments.model else TEMPLATE,
    }


async def show_ahead(
    crawl: ComparedGroup, backend: VllmBackend, arguments: argparse.Namespace, ahead: list[AheadPair]
) -> None:
    """Repeat the crawl of the last question with drafts of its answer."""
    pair = crawl.pairs[: len(questions_of(arguments))][-1]
    console.rule("[bold]answers ahead", align="left")
    console.print(
        f"The crawl of the question {pair.question!r} again. The engine has time, and drafts the answer from the pages "
        "so far. It is grey until it is verified: later pages may change it, and then nothing is gained. "
        "docs/answer-ahead.md says how often."
    )
    source = ReplaySource(arguments.out / "crawl.jsonl")
    async with Pipeline(source, backend, owns_backend=False) as pipeline:
        with DraftDisplay(console, printable) as display:
            ahead.append(await ask_ahead(pipeline, backend, pair, options_of(arguments), display.show))
    console.print(f"   {ahead[-1].outcome()}", soft_wrap=True)


def seconds_of(pair: AskedPair) -> str:
    streaming, waiting = (answer.timings.ttft_after_retrieval_s for answer in pair.answers)
    return f"first token after retrieval: streaming {streaming:.2f} s, not streaming {waiting:.2f} s"


def print_answer(answer: Answer) -> None:
    """The answer, and the passages that it cites."""
    cited = {int(number) for number in CITED.findall(answer.text)}
    tell_indented(" ".join(answer.text.split()))
    for citation in answer.citations:
        if citation.number in cited:
            tell_indented(f"[{citation.number}] {citation.title} {citation.uri}")


def show(event: QueryEvent) -> None:
    """Tell a person what happened, and when."""
    match event:
        case ChunkArrived(chunk=chunk):
            tell(event.at_s, f"+ {chunk.title[:60]} {chunk.uri}#{chunk.passage}")
        case DocumentSkipped():
            tell(event.at_s, f"- {event.uri}: {event.reason}")
        case RetrievalCutShort():
            tell(event.at_s, f"retrieval was cut short: {event.reason}")
        case ContextChanged() if event.num_shared == event.num_tokens:
            tell(event.at_s, "  context unchanged")
        case ContextChanged():
            counts = f"{event.num_shared} shared with the last, {event.num_invalidated} invalidated"
            tell(event.at_s, f"  context of {size_of(event)}: {counts}")
        case ContextComplete():
            tell(event.at_s, f"retrieval complete: {size_of(event)}")
        case Answered(answer=answer):
            tell(event.at_s, f"answer: {answer.text}")


def size_of(context: ContextChanged | ContextComplete) -> str:
    passages = "1 passage" if context.num_chunks == 1 else f"{context.num_chunks} passages"
    return f"{passages}, {context.num_tokens} tokens"


def tell(at_s: float, line: str) -> None:
    console.print(f"{at_s:7.2f} s {printable(line)}", markup=False, soft_wrap=True)


def tell_indented(line: str) -> None:
    console.print(f"   {printable(line)}", markup=False, soft_wrap=True)


def printable(line: str) -> str:
    """One line; what a page or a model wrote cannot write to the terminal as it likes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def save(out: Path, groups: Sequence[ComparedGroup], ahead: list[AheadPair], others_share: float) -> None:
    """The timeline picture, and the numbers behind it, with the share of the cores that other programs kept busy."""
    rows = [
        (
            group.name,
            [
                QueryRow(f"{number + 1} {arm}", events)
                for number, pair in enumerate(group.pairs[:MIN_ROUNDS])
                for arm, events in (("not streaming", pair.waiting), ("streaming", pair.streaming))
            ],
        )
        for group in groups
    ]
    for pair in ahead:
        row = [QueryRow("without drafts", pair.without), QueryRow("with drafts", pair.ahead)]
        rows.append(("a crawl, both streaming", row))
    draw_queries(rows, title="From the query to the answer, with and without streaming").savefig(out / "timeline.png")
    results: dict[str, Any] = {group.name: [row for pair in group.pairs for row in pair.rows()] for group in groups}
    if ahead:
        results["answers ahead"] = ahead[0].rows
    results["share of cores kept busy by others"] = others_share
    (out / "results.json").write_text(json.dumps(results, indent=2))
    for what, name in (("timeline", "timeline.png"), ("numbers", "results.json")):
        console.print(f"{what}: {os.path.relpath(out / name)}", soft_wrap=True)


async def run(arguments: argparse.Namespace, groups: Sequence[ComparedGroup], ahead: list[AheadPair]) -> None:
    """Record the retrieval of both sources, and measure both groups; then show an answer ahead, and add its pair."""
    await record_all(arguments, questions_of(arguments))
    # In float32 the answers of both arms are equal to the token, in whatever pieces their prompts were prefilled,
    # but for ties within rounding, which few layers keep rare: see "Exactness" in docs/backends.md.
    backend = VllmBackend(
        arguments.model or arguments.out / "model",
        max_model_len=MAX_MODEL_LEN,
        engine_args={"dtype": "auto" if arguments.model else "float32"},
        answer_ahead=arguments.model is None,  # not every model can, and on a GPU it has a price
    )
    async with AsyncExitStack() as stack:
        with console.status("starting") as status:
            stack.push_async_callback(backend.aclose)
            await backend.start(status.update)
        for group, what, is_own in zip(groups, (CRAWL, SEARCH), (arguments.url, arguments.index), strict=True):
            console.rule(f"[bold]{group.name}", align="left")
            console.print("Recorded before, and replayed at the recorded times." if is_own else what)
            await compare(group, backend, arguments)
        if arguments.model is None:
            await show_ahead(groups[0], backend, arguments, ahead)


def print_results(
    arguments: argparse.Namespace, groups: Sequence[ComparedGroup], ahead: list[AheadPair], others_share: float
) -> None:
    """Print and save what was measured."""
    measured = [group for group in groups if group.rounds]
    if not measured:
        return
    console.rule("[bold]results", align="left")
    console.print(
        "Median seconds to the first token, of pairs with the same retrieval, and how many times as fast streaming is:"
    )
    console.print(make_table(measured, FIRST_TOKEN))
    remedy = f"run .venv/bin/python examples/demo.py --minutes {2 * arguments.minutes:g}"
    if unclear := why_unclear(measured, others_share, FIRST_TOKEN, remedy):
        console.print(f"[yellow]{unclear}")
    for group in measured:
        _, *sentences = verdict(group)  # the first one has the figures of the table
        console.print(f"[bold]{group.name}[/], {len(group.rounds)} pair{'s' * (len(group.rounds) != 1)}:")
        for sentence in sentences:
            console.print(f"- {sentence}")
    save(arguments.out, measured, ahead, others_share)
    if arguments.model:
        console.print(
            "In another dtype than float32 some answers may differ by rounding alone: docs/backends.md#exactness"
        )
    if arguments.tiny:
        console.print("The model has random weights: its answers are noise. --model, --url and --index take real ones.")
    console.print("The same with your questions, source and model: streamrag compare --help", highlight=False)


def main() -> int:
    try:
        arguments = parse_arguments()
        prepare(arguments)
        groups, ahead = (ComparedGroup("crawl"), ComparedGroup("search")), list[AheadPair]()
        others = OthersLoad()
        try:
            asyncio.run(run(arguments, groups, ahead))
        finally:  # also what was measured before Ctrl-C
            print_results(arguments, groups, ahead, others.share())
    except StreamRagError as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
