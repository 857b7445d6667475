"""The main job on real parts: a crawl, and a search that refines its result by keywords, vectors and a reranker, stream
into a vLLM on CPU; and the same without streaming.

Run it with `make demo`. Without options it serves streamrag's own documentation on loopback, indexes it, and asks a
small model, SmolLM2 with 135 M parameters, made by `streamrag demo-model`. With `--tiny` it is a Llama with random
weights, which is faster, and whose answers are noise: what that shows is when things happen.
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

from demo_site import MEDIAN_LATENCY_S
from demo_timeline import QueryRow, draw_timeline
from rich.console import Console
from rich.table import Table

from streamrag import (
    HybridSource,
    NearEnd,
    Pipeline,
    PromptTemplate,
    SamplingParams,
    Source,
    StreamRagError,
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
    Event,
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


@dataclass(frozen=True)
class Pair:
    """One question asked both ways."""

    question: str
    streaming: list[Event]
    waiting: list[Event]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        ends = (self.streaming[-1], self.waiting[-1])
        assert isinstance(ends[0], Answered)
        assert isinstance(ends[1], Answered)
        return ends[0].answer, ends[1].answer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="another model for vLLM")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, whose answers are noise")
    parser.add_argument("--url", metavar="URL", help="a real site to crawl")
    parser.add_argument("--index", metavar="FOLDER", help="a real index, made by `streamrag index build`")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="instead of the demo's; may be repeated")
    parser.add_argument("--queries", type=int, default=5, metavar="N", help="pairs of queries in each mode (5)")
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
        console.print(f"using the site, the index and the model that an earlier run left in {out.name}/")


@asynccontextmanager
async def serve(site: Path) -> AsyncIterator[str]:
    """The address of the site, served from a process of its own."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("demo_site.py")), str(site), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout
    try:
        port = int(await server.stdout.readline())
        yield f"http://127.0.0.1:{port}/index.html"
    finally:
        server.terminate()
        await server.wait()


async def ask_both_ways(
    source: Source, backend: VllmBackend, questions: list[str], params: SamplingParams, template: PromptTemplate
) -> list[Pair]:
    """Each question streaming and not, on an empty prefix cache; who goes first alternates. Shows the first one."""
    pairs = []
    async with Pipeline(source, backend, owns_source=False, owns_backend=False, template=template) as pipeline:
        for number, question in enumerate(questions):
            events: dict[bool, list[Event]] = {}
            for overlap in (True, False) if number % 2 == 0 else (False, True):
                await backend.reset_prefix_cache()
                stream = pipeline.events(
                    question, params=params, overlap=overlap, max_context_tokens=MAX_CONTEXT_TOKENS
                )
                if number == 0 and overlap:
                    events[overlap] = [show(event) async for event in stream]
                else:
                    with console.status(f"{question} ({'streaming' if overlap else 'not streaming'})"):
                        events[overlap] = [event async for event in stream]
            pair = Pair(question, events[True], events[False])
            pairs.append(pair)
            streaming, waiting = (answer.timings.ttft_after_retrieval_s for answer in pair.answers)
            console.print(
                f"{number + 1}. {question}\n   first token after retrieval: streaming {streaming:.2f} s, "
                f"not streaming {waiting:.2f} s",
            )
            print_answer(pair.answers[0])
    return pairs


def print_answer(answer: Answer) -> None:
    """The answer, and the passages that it cites."""
    cited = {int(number) for number in CITED.findall(answer.text)}
    tell_indented(" ".join(answer.text.split()))
    for citation in answer.citations:
        if citation.number in cited:
            tell_indented(f"[{citation.number}] {citation.title} {citation.uri}")


def show(event: Event) -> Event:
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
    return event


def tell(at_s: float, line: str) -> None:
    console.print(f"{at_s:7.2f} s {printable(line)}", markup=False, soft_wrap=True)


def tell_indented(line: str) -> None:
    console.print(f"   {printable(line)}", markup=False, soft_wrap=True)


def printable(line: str) -> str:
    """One line; what a page or a model wrote cannot write to the terminal as it likes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def print_table(groups: dict[str, list[Pair]]) -> None:
    """Medians of the paired queries."""
    table = Table(title="Medians of paired queries", title_justify="left")
    for heading in ("", "in seconds"):
        table.add_column(heading, no_wrap=True)
    for heading in ("streaming", "not\nstreaming", "ratio"):
        table.add_column(heading, justify="right")
    for name, pairs in groups.items():
        for measure in ("ttft_s", "ttft_after_retrieval_s"):
            both = [[getattr(answer.timings, measure) for answer in pair.answers] for pair in pairs]
            streaming, waiting = (statistics.median(column) for column in zip(*both, strict=True))
            ratio = statistics.median(waiting / streaming for streaming, waiting in both)
            table.add_row(name, measure, f"{streaming:.2f}", f"{waiting:.2f}", f"{ratio:.2f}x")
    console.print(table)
    for name, pairs in groups.items():
        same = [pair for pair in pairs if len({answer.citations for answer in pair.answers}) == 1]
        num_equal = sum(len({answer.token_ids for answer in pair.answers}) == 1 for pair in same)
        num_updates = [sum(isinstance(event, ContextChanged) for event in pair.streaming) - 1 for pair in pairs]
        num_tokens = statistics.median(pair.answers[0].num_prompt_tokens for pair in pairs)
        num_invalidated = sum(pair.answers[0].num_invalidated for pair in pairs)
        console.print(
            f"{name}: prompts of {num_tokens:.0f} tokens (median), {_from_to(num_updates)} of context, "
            f"{num_invalidated} tokens invalidated in all; retrieval brought the same context both ways in "
            f"{len(same)} of {len(pairs)} pairs, and the answers have the same tokens in {num_equal} of those"
        )


def _from_to(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least} to {most} changes" if least < most else f"{most} change{'s' * (most != 1)}"


def save(out: Path, groups: dict[str, list[Pair]]) -> None:
    """The timeline picture, and the numbers behind it."""
    rows = [
        (
            name,
            [
                QueryRow(f"{number + 1} {arm}", events)
                for number, pair in enumerate(pairs)
                for arm, events in (("not streaming", pair.waiting), ("streaming", pair.streaming))
            ],
        )
        for name, pairs in groups.items()
    ]
    draw_timeline(out / "timeline.png", rows, title="From the query to the answer, with and without streaming")
    results = {
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
            for pair in pairs
            for arm, answer in zip(("streaming", "not streaming"), pair.answers, strict=True)
        ]
        for name, pairs in groups.items()
    }
    (out / "results.json").write_text(json.dumps(results, indent=2))
    for what, name in (("timeline", "timeline.png"), ("numbers", "results.json")):
        console.print(f"{what}: {os.path.relpath(out / name)}", soft_wrap=True)


async def run(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    questions = [*(arguments.ask or QUESTIONS)]
    questions = (questions * arguments.queries)[: arguments.queries]
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=arguments.tiny)
    index = arguments.index or out / "index"
    template = PromptTemplate() if arguments.model else TEMPLATE
    groups: dict[str, list[Pair]] = {}
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
            dtype="auto" if arguments.model else "float32",
        )
        crawl = WebSource([url], max_pages=12, max_page_chars=1500, num_workers=1, allow_private=arguments.url is None)
        search = NearEnd(
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
                "is sent.",
            ),
        ):
            console.rule(f"[bold]{name}", align="left")
            console.print(what)
            groups[name] = await ask_both_ways(source, backend, questions, params, template)
    console.rule("[bold]what came of it", align="left")
    print_table(groups)
    save(out, groups)
    if arguments.model:
        console.print(
            "In another dtype than float32 some answers may differ by rounding alone: docs/backends.md#exactness"
        )
    if arguments.tiny:
        console.print("The model has random weights: its answers are noise. --model, --url and --index take real ones.")


def main() -> int:
    try:
        arguments = parse_arguments()
        prepare(arguments)
        asyncio.run(run(arguments))
    except StreamRagError as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
