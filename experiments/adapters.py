"""What an application of LangChain, LlamaIndex or Haystack gains from streamrag, and what the adapters cost.

    python experiments/adapters.py [--json FILE]

Each application is asked 40 questions in its own form and with streamrag in it, on one server of vLLM with an empty
prefix cache. The arms take turns at every question. Then LangChain's is asked on an embedded engine, which frameworks
cannot stream from: there it is streamrag that retrieves first and then asks, or overlaps. Random weights: the answers
mean nothing, the work is real. All arms of an application must have the same prompt, token by token. The exception is
`AppendMode`, which has the same passages in another order.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import adapter_applications as applications
import httpx
from adapter_applications import Application, Ask
from adapter_costs import Cost, measure_costs
from adapter_engines import ROOT, SETTINGS, Embedded, Kept, Served, serve_site, start_embedded, start_server
from adapter_site import Page, Search, Site, questions, read_pages
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag import AppendMode, OpenAIBackend, VllmBackend
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

NUM_LOADED, NUM_REMOTE = 6, 3
"""Pages of the site in a prompt: of LangChain's loader, and of the retriever beside one that is in memory."""
SIZES: dict[str, Any] = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 4_096}
TIMES = ("ttft_s", "ttft_after_retrieval_s")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Arm:
    """An application in one form, and what it reads and asks."""

    framework: str
    name: str
    ask: Ask
    site: Site
    backend: Kept | None = None
    """None where the framework asks the server itself."""


@dataclass(frozen=True)
class Answered:
    """One question in one arm."""

    ttft_s: float
    ttft_after_retrieval_s: float
    text: str
    prompt: tuple[int, ...]


async def of_server(stack: AsyncExitStack, engine: Served, client: httpx.AsyncClient, pages: list[Page]) -> list[Arm]:
    loaded = Site(client, Search(pages), NUM_LOADED)
    notes, remote = pages[::2], Site(client, Search(pages[1::2]), NUM_REMOTE)
    nodes = applications.llamaindex_retriever(Search(notes), remote)
    documents = applications.haystack_retriever(notes, remote)
    langchain = applications.langchain_with_streamrag(loaded)
    llamaindex = applications.llamaindex_with_streamrag(nodes)
    growing = applications.llamaindex_with_streamrag(nodes, AppendMode())
    in_haystack = applications.haystack_with_streamrag(documents)
    backend, url = engine.backend, engine.url
    return [
        Arm("LangChain", "its own", applications.langchain_chain(loaded, url), loaded),
        await with_streamrag(stack, "LangChain", "streamrag", loaded, backend, langchain),
        Arm("LlamaIndex", "its own", applications.llamaindex_engine(nodes, url), remote),
        await with_streamrag(stack, "LlamaIndex", "streamrag", remote, backend, llamaindex),
        await with_streamrag(stack, "LlamaIndex", "streamrag, AppendMode", remote, backend, growing),
        Arm("Haystack", "its own", applications.haystack_pipeline(documents, url), remote),
        await with_streamrag(stack, "Haystack", "streamrag", remote, backend, in_haystack),
    ]


async def of_embedded(
    stack: AsyncExitStack, engine: Embedded, client: httpx.AsyncClient, pages: list[Page]
) -> list[Arm]:
    loaded = Site(client, Search(pages), NUM_LOADED)
    framework, backend = "LangChain, embedded engine", engine.backend
    waiting = applications.langchain_with_streamrag(loaded, overlap=False)
    langchain = applications.langchain_with_streamrag(loaded)
    return [
        await with_streamrag(stack, framework, "retrieves, then asks", loaded, backend, waiting),
        await with_streamrag(stack, framework, "streamrag", loaded, backend, langchain),
    ]


async def with_streamrag(
    stack: AsyncExitStack,
    framework: str,
    name: str,
    site: Site,
    backend: OpenAIBackend | VllmBackend,
    application: Application,
) -> Arm:
    kept = Kept(backend)
    return Arm(framework, name, await stack.enter_async_context(application(kept)), site, kept)


async def measure(num_questions: int) -> list[dict[str, Any]]:
    pages = read_pages(ROOT / "docs")
    asked = questions(pages, num_questions)
    found = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))  # vLLM's sockets
        model = prepare(folder, pages)
        site_url = await stack.enter_async_context(serve_site(folder / "site"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=site_url, trust_env=False))
        # One after the other: a worker of vLLM waits busily for its next step, and would take time from the other's.
        async with start_server(model, folder / "log") as served, AsyncExitStack() as applied:
            found += await ask_all(served, await of_server(applied, served, client, pages), asked)
        async with start_embedded(model) as embedded, AsyncExitStack() as applied:
            found += await ask_all(embedded, await of_embedded(applied, embedded, client, pages), asked)
    return found


async def ask_all(engine: Served | Embedded, arms: list[Arm], asked: list[str]) -> list[dict[str, Any]]:
    """Each question in each arm; who goes first changes. The first round is not counted."""
    answered: list[list[Answered]] = [[] for _ in arms]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("questions", total=len(arms) * (len(asked) + 1))
        for number, question in enumerate([asked[-1], *asked]):
            for turn in range(len(arms)):
                i = (number + turn) % len(arms)
                answered[i].append(await ask(engine, arms[i], question))
                progress.advance(task)
    found = [each[1:] for each in answered]
    firsts: dict[str, list[Answered]] = {}
    return [row(arm, each, firsts.setdefault(arm.framework, each)) for arm, each in zip(arms, found, strict=True)]


def prepare(folder: Path, pages: list[Page]) -> Path:
    """Write the site and the model."""
    (folder / "site").mkdir()
    for page in pages:
        (folder / "site" / page.name).write_text(page.text)
    corpus = [page.text for page in pages]
    return make_tiny_llama(folder / "model", corpus=corpus, max_model_len=SETTINGS["max_model_len"], **SIZES)


async def ask(engine: Served | Embedded, arm: Arm, question: str) -> Answered:
    await engine.forget()
    applications.asked.clear()
    texts, first_s = [], 0.0
    began_s = time.monotonic()
    async for text in arm.ask(question):
        first_s = first_s or (time.monotonic() if text else 0.0)
        texts.append(text)
    if arm.backend is not None:
        prompt = arm.backend.prompt
    else:
        assert isinstance(engine, Served)
        prompt = await engine.prompt_of(*applications.asked)
    return Answered(first_s - began_s, first_s - arm.site.ended_s, "".join(texts), prompt)


def row(arm: Arm, found: list[Answered], of_first: list[Answered]) -> dict[str, Any]:
    """What an arm did, compared with the first of its application."""
    pairs = list(zip(of_first, found, strict=True))
    made: dict[str, Any] = {
        "framework": arm.framework,
        "arm": arm.name,
        "num_questions": len(found),
        "num_prompt_tokens": median(len(each.prompt) for each in found),
        "num_same_prompt": sum(own.prompt == each.prompt for own, each in pairs),
        "num_same_prompt_in_some_order": sum(sorted(own.prompt) == sorted(each.prompt) for own, each in pairs),
        "num_same_answer": sum(own.text == each.text for own, each in pairs),
        "retrieval_s": median(each.ttft_s - each.ttft_after_retrieval_s for each in found),
    }
    for name in TIMES:
        all_s = [getattr(each, name) for each in found]
        made[name] = {
            "p50": percentile(all_s, 0.5),
            "p95": percentile(all_s, 0.95),
            "median_ratio": median(getattr(own, name) / getattr(each, name) for own, each in pairs),
            "all_s": all_s,
        }
    return made


def show(found: list[dict[str, Any]], costs: list[Cost]) -> None:
    title = "Seconds to the first token, from the question, and from the end of retrieval; medians of paired ratios"
    table = Table(title=title, title_justify="left")
    for name in ("", "the chain"):
        table.add_column(name)
    for name in ("P50", "P95", "ratio", "P50\nafter", "P95\nafter", "ratio", "same\nprompt", "same\nanswer"):
        table.add_column(name, justify="right")
    for each in found:
        cells = [
            cell
            for of in (each[name] for name in TIMES)
            for cell in (f"{of['p50']:.2f}", f"{of['p95']:.2f}", f"{of['median_ratio']:.2f}x")
        ]
        cells += [f"{each[name]}/{each['num_questions']}" for name in ("num_same_prompt", "num_same_answer")]
        table.add_row(each["framework"], each["arm"], *cells)
    console.print(table)
    table = Table(title="What an adapter adds, in microseconds", title_justify="left")
    for name in ("", "to"):
        table.add_column(name)
    for name in ("median", "least .. most"):
        table.add_column(name, justify="right")
    for cost in costs:
        spread = f"{cost.least_us:.1f} .. {cost.most_us:.1f}"
        table.add_row(cost.framework, cost.what, f"{cost.median_us:.1f}", spread)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=40, help="of each arm (default: 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with console.status("measuring what the adapters cost"):
        costs = asyncio.run(measure_costs())
    found = asyncio.run(measure(arguments.questions))
    show(found, costs)
    if arguments.json:
        made = {
            "command": "make bench-adapters",
            "machine": {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()},
            "versions": versions(),
            "model": SIZES,
            "engine": SETTINGS,
            "results": found,
            "costs": [asdict(cost) for cost in costs],
        }
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")
    return check(found)


def check(found: list[dict[str, Any]]) -> int:
    """1 if an arm had another prompt than the first of its application, and says so."""
    wrong = []
    for each in found:
        name = "num_same_prompt_in_some_order" if "AppendMode" in each["arm"] else "num_same_prompt"
        if each[name] < each["num_questions"]:
            wrong.append(f"{each['framework']}, {each['arm']}: {each['num_questions'] - each[name]} other prompts")
    for line in wrong:
        console.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("haystack").setLevel(logging.ERROR)  # answers that are cut at a few tokens
    warnings.filterwarnings("ignore", "'MultiRetriever' is an experimental component")
    sys.exit(main())
