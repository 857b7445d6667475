"""Streams a crawl, and a search by keywords, vectors and a reranker, into vLLM on CPU, and compares with not streaming.

At last it repeats the crawl slowly, and shows an answer that is drafted before it ends.

Run it with `make demo`. By default it serves streamrag's own documentation on loopback, indexes it, and asks SmolLM2, a
model with 135 M parameters made by `streamrag demo-model`. For each source it shows one question live, records the
retrieval of all questions, and repeats them in pairs with the recorded retrieval until the confidence intervals are
narrow or time is over. Ctrl-C ends it, and keeps what was measured. With `--tiny` the model is a small Llama with
random weights: it is faster, and its answers are noise.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from demo_ahead import CRAWL_S, AheadPair, DraftDisplay, ask_ahead
from demo_comparison import (
    BUSY_LOAD,
    CONFIDENCE,
    MEASURES,
    MIN_PAIRS,
    Interval,
    OthersLoad,
    Pair,
    ask_pair,
    ask_pairs,
    intervals,
)
from demo_site import MEDIAN_LATENCY_S
from demo_timeline import QueryRow, draw_timeline
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from streamrag import (
    DelayedUpdates,
    HybridSource,
    Pipeline,
    PromptTemplate,
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
LEAD_S = 0.3
"""Before the end of the search. Reranking and prefill want the same cores here, and this prompt needs no more time."""

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
        "--minutes", type=float, default=2.0, metavar="M", help="per source, after which no pair begins (2)"
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


@dataclass(frozen=True)
class Group:
    """What was measured of one source."""

    live: Pair
    """The first question, with the retrieval itself."""
    pairs: list[Pair]
    """Questions with the recorded retrieval."""


async def compare(
    name: str, source: Source, backend: VllmBackend, arguments: argparse.Namespace, groups: dict[str, Group]
) -> None:
    """Show one question live, record the retrieval of all, and ask them both ways with the recorded retrieval.

    groups: the group is added here before its pairs are measured.
    """
    questions = [*(arguments.ask or QUESTIONS)][: arguments.queries]
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=arguments.tiny)
    template = PromptTemplate() if arguments.model else TEMPLATE
    trace = arguments.out / f"{name}.jsonl"
    trace.unlink(missing_ok=True)
    options: dict[str, Any] = {"owns_source": False, "owns_backend": False, "template": template}
    async with Pipeline(source, backend, **options) as pipeline:
        live = await ask_pair(
            pipeline, backend, questions[0], params, max_context_tokens=MAX_CONTEXT_TOKENS, on_event=show
        )
    groups[name] = Group(live, pairs := [])
    console.print(f"1. {live.question}\n   {seconds_of(live)}")
    print_answer(live.answers[0])
    async with Pipeline(source, backend, recorder=TraceRecorder(trace), **options) as pipeline:
        for number, question in enumerate(questions):
            with console.status(f"recording the retrieval of question {number + 1} of {len(questions)}"):
                stream = pipeline.stream(
                    question, params=SamplingParams(max_tokens=1), overlap=False, max_context_tokens=MAX_CONTEXT_TOKENS
                )
                async for _ in stream:
                    pass
    with console.status("asking both ways, with the recorded retrieval") as status:
        async with Pipeline(ReplaySource(trace), backend, **options) as pipeline:
            asked = ask_pairs(
                pipeline,
                backend,
                questions,
                params,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                most_s=60 * arguments.minutes,
                most_pairs=arguments.queries,
            )
            async for pair in asked:
                pairs.append(pair)
                status.update(f"{pair.question} {seconds_of(pair)}")
    for pair in pairs[1 : len(questions)]:
        console.print(f"{questions.index(pair.question) + 1}. {pair.question}\n   {seconds_of(pair)}")
        print_answer(pair.answers[0])


async def show_ahead(crawl: Group, backend: VllmBackend, arguments: argparse.Namespace, ahead: list[AheadPair]) -> None:
    """Repeat the recorded crawl of the last question slowly, with drafts of its answer and without."""
    recorded = crawl.pairs[: len(arguments.ask or QUESTIONS)]
    factor = max(CRAWL_S / recorded[-1].answers[0].timings.retrieval_s, 1.0)
    console.rule("[bold]answers ahead", align="left")
    console.print(
        f"The crawl of question {len(recorded)} again, {factor:.1f} times as slow, as long as real ones. The engine "
        "has time, and drafts the answer from the pages so far. It is grey until it is verified: later pages may "
        "change it, and then nothing is gained. docs/answer-ahead.md says how often."
    )
    source = ReplaySource(arguments.out / "crawl.jsonl", delay=factor)
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=arguments.tiny)
    async with Pipeline(source, backend, owns_backend=False, template=TEMPLATE) as pipeline:
        with DraftDisplay(console, printable) as display:
            pair = await ask_ahead(
                pipeline,
                backend,
                recorded[-1].question,
                params,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                on_event=display.show,
            )
    ahead.append(pair)
    console.print(f"   {pair.outcome()}", soft_wrap=True)


def seconds_of(pair: Pair) -> str:
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
        case ContextChanged():
            tell(
                event.at_s,
                f"  context of {event.num_chunks} chunks, {event.num_tokens} tokens: {event.num_shared} shared with "
                f"the last, {event.num_invalidated} invalidated",
            )
        case ContextComplete():
            tell(event.at_s, f"retrieval complete: {event.num_chunks} chunks, {event.num_tokens} tokens")
        case Answered(answer=answer):
            tell(event.at_s, f"answer: {answer.text}")


def tell(at_s: float, line: str) -> None:
    console.print(f"{at_s:7.2f} s {printable(line)}", markup=False, soft_wrap=True)


def tell_indented(line: str) -> None:
    console.print(f"   {printable(line)}", markup=False, soft_wrap=True)


def printable(line: str) -> str:
    """One line; what a page or a model wrote cannot write to the terminal as it likes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def print_table(groups: dict[str, Group]) -> None:
    """Print how many times as fast streaming is, with intervals, and whether the answers are the same."""
    title = "Streaming against not streaming: median seconds of pairs with the same retrieval"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "to the"):
        table.add_column(heading, no_wrap=True)
    for heading in ("streaming", "not", "ratio", f"{CONFIDENCE:.0%} interval", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, group in groups.items():
        for measure, (low, middle, high) in intervals(group.pairs).items():
            both = [[measure(answer.timings) for answer in pair.answers] for pair in group.pairs]
            streaming, waiting = (statistics.median(column) for column in zip(*both, strict=True))
            cells = (f"{streaming:.2f}", f"{waiting:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
            table.add_row(name, MEASURES[measure], *cells, Interval(low, middle, high).verdict)
    console.print(table)
    console.print("ratio: how many times as fast streaming is, as a geometric mean of the pairs")
    for name, group in groups.items():
        pairs = group.pairs
        live = ", ".join(f"{group.live.ratio(measure):.2f}" for measure in MEASURES)
        console.print(
            f"{name}: {len(pairs)} pair{'s' * (len(pairs) != 1)}; the same ratios of the live pair, with retrieval "
            f"itself: {live}"
        )
        same = [pair for pair in pairs if len({answer.citations for answer in pair.answers}) == 1]
        num_equal = sum(len({answer.token_ids for answer in pair.answers}) == 1 for pair in same)
        contexts = [[e for e in pair.streaming if isinstance(e, ContextChanged) and e.chunks] for pair in pairs]
        num_updates = [len(changed) - 1 for changed in contexts]
        num_tokens = statistics.median(pair.answers[0].num_prompt_tokens for pair in pairs)
        num_invalidated = sum(pair.answers[0].num_invalidated for pair in pairs)
        console.print(
            f"{name}: prompts of {num_tokens:.0f} tokens (median), {_from_to(num_updates)} of context, "
            f"{num_invalidated} tokens invalidated in all; the context was the same both ways in {len(same)} of "
            f"{len(pairs)} pairs, and the answers have the same tokens in {num_equal} of those"
        )


def warn_if_busy(load: float, tense: str) -> None:
    if load > BUSY_LOAD:
        console.print(
            f"[yellow]Other programs {tense} {load:.0%} of this machine's cores busy: do not rely on these times. Run "
            "the demo again on a quiet machine."
        )


def _from_to(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least} to {most} changes" if least < most else f"{most} change{'s' * (most != 1)}"


def save(out: Path, groups: dict[str, Group], ahead: list[AheadPair], others_share: float) -> None:
    """The timeline picture, and the numbers behind it, with the share of the cores that other programs kept busy."""
    rows = [
        (
            name,
            [
                QueryRow(f"{number or 'live'} {arm}", events)
                for number, pair in enumerate([group.live, *group.pairs[:MIN_PAIRS]])
                for arm, events in (("not streaming", pair.waiting), ("streaming", pair.streaming))
            ],
        )
        for name, group in groups.items()
    ]
    for pair in ahead:
        row = [QueryRow("without drafts", pair.without), QueryRow("with drafts", pair.ahead)]
        rows.append(("a slow crawl, both streaming", row))
    draw_timeline(out / "timeline.png", rows, title="From the query to the answer, with and without streaming")
    results: dict[str, Any] = {
        name: [
            {
                "question": pair.question,
                "arm": arm,
                **asdict(answer.timings),
                "num_prompt_tokens": answer.num_prompt_tokens,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "sources": [citation.uri for citation in answer.citations],
            }
            for pair in group.pairs
            for arm, answer in zip(("streaming", "not streaming"), pair.answers, strict=True)
        ]
        for name, group in groups.items()
    }
    if ahead:
        results["answers ahead"] = ahead[0].rows
    results["share of cores kept busy by others"] = others_share
    (out / "results.json").write_text(json.dumps(results, indent=2))
    for what, name in (("timeline", "timeline.png"), ("numbers", "results.json")):
        console.print(f"{what}: {os.path.relpath(out / name)}", soft_wrap=True)


async def run(arguments: argparse.Namespace, groups: dict[str, Group], ahead: list[AheadPair]) -> None:
    """Measure both sources, and add their groups; then show an answer ahead, and add its pair."""
    out: Path = arguments.out
    index = arguments.index or out / "index"
    async with AsyncExitStack() as stack:
        url = arguments.url
        if url is None:
            url = await stack.enter_async_context(serve(out / "site"))
            console.print(f"serving the site at {url}, with a median latency of {MEDIAN_LATENCY_S} s a page")
        # In float32 the answers of both arms are equal to the token, in whatever pieces their prompts were prefilled,
        # but for ties within rounding, which few layers keep rare: see "Exactness" in docs/backends.md.
        backend = VllmBackend(
            arguments.model or out / "model",
            max_model_len=MAX_MODEL_LEN,
            engine_args={"dtype": "auto" if arguments.model else "float32"},
            answer_ahead=arguments.model is None,  # not every model can, and on a GPU it has a price
        )
        crawl = WebSource([url], max_pages=12, max_page_chars=1500, num_workers=1, allow_private=arguments.url is None)
        search = DelayedUpdates(
            HybridSource(index, k=NUM_PASSAGES, reranker="late-interaction", sentences=NUM_SENTENCES), LEAD_S
        )
        with console.status("starting") as status:
            for part in (backend, crawl, search):
                stack.push_async_callback(part.aclose)
            await asyncio.gather(*(part.start(status.update) for part in (backend, crawl, search)))
        for name, source, what in (
            ("crawl", crawl, "Pages append to the context."),
            (
                "search",
                search,
                "Keywords, then vectors, then a reranker update the context, each when it knows better. The first "
                "question shows all of it; then it is known how long a search takes, and only what comes near its end "
                "is sent. The pairs repeat the recorded search: its reranker takes no cores then.",
            ),
        ):
            console.rule(f"[bold]{name}", align="left")
            console.print(what)
            await compare(name, source, backend, arguments, groups)
        if arguments.model is None:
            await show_ahead(groups["crawl"], backend, arguments, ahead)


def print_results(
    arguments: argparse.Namespace, groups: dict[str, Group], ahead: list[AheadPair], others: OthersLoad
) -> None:
    """Print and save what was measured."""
    measured = {name: group for name, group in groups.items() if group.pairs}
    if not measured:
        return
    console.rule("[bold]results", align="left")
    print_table(measured)
    others_share = others.share()
    warn_if_busy(others_share, "kept")
    save(arguments.out, measured, ahead, others_share)
    if arguments.model:
        console.print(
            "In another dtype than float32 some answers may differ by rounding alone: docs/backends.md#exactness"
        )
    if arguments.tiny:
        console.print("The model has random weights: its answers are noise. --model, --url and --index take real ones.")


def main() -> int:
    try:
        arguments = parse_arguments()
        warn_if_busy(psutil.cpu_percent(interval=1) / 100, "keep")
        prepare(arguments)
        groups: dict[str, Group] = {}
        ahead: list[AheadPair] = []
        others = OthersLoad()
        try:
            asyncio.run(run(arguments, groups, ahead))
        finally:  # also what was measured before Ctrl-C
            print_results(arguments, groups, ahead, others)
    except StreamRagError as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
