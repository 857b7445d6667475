"""What an application of LangChain, LlamaIndex or Haystack gains from streamrag, and what the adapters cost.

    python experiments/adapters.py [--json FILE]

Each application is asked 40 questions in its own form and with streamrag in it, on one server of vLLM with an empty
prefix cache; LangChain's on an embedded engine too. The arms take turns at every question. Random weights: the answers
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
from adapter_applications import OWN, Application
from adapter_costs import Cost, measure_costs
from adapter_engines import ROOT, SETTINGS, Engines, Kept, serve_site, start_engines
from adapter_site import Page, Search, Site, questions, read_pages
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag import AppendMode
from streamrag.bench.provenance import versions
from streamrag.bench.summary import percentile
from streamrag.files import write_whole
from streamrag.testing import make_tiny_llama

NUM_LOADED, NUM_REMOTE = 5, 3
"""Pages of the site in a prompt: of LangChain's loader, and of the retriever beside one that is in memory."""
SIZES: dict[str, Any] = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 4_096}
TIMES = ("ttft_s", "ttft_after_retrieval_s")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Arm:
    """An application in one form, and what it reads and asks."""

    framework: str
    name: str
    ask: applications.Ask
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


async def make_arms(stack: AsyncExitStack, engines: Engines, client: httpx.AsyncClient, pages: list[Page]) -> list[Arm]:
    loaded = Site(client, Search(pages), NUM_LOADED)
    notes, remote = pages[::2], Site(client, Search(pages[1::2]), NUM_REMOTE)
    nodes = applications.llamaindex_retriever(Search(notes), remote)
    documents = applications.haystack_retriever(notes, remote)

    async def with_streamrag(framework: str, name: str, site: Site, backend: Any, application: Application) -> Arm:
        kept = Kept(backend)
        return Arm(framework, name, await stack.enter_async_context(application(kept)), site, kept)

    server, embedded = engines.server, engines.embedded
    langchain = applications.langchain_with_streamrag(loaded)
    llamaindex = applications.llamaindex_with_streamrag(nodes)
    growing = applications.llamaindex_with_streamrag(nodes, AppendMode())
    of_haystack = applications.haystack_with_streamrag(documents)
    return [
        Arm("LangChain", OWN, applications.langchain_chain(loaded, engines.url), loaded),
        await with_streamrag("LangChain", "streamrag", loaded, server, langchain),
        await with_streamrag("LangChain", "streamrag, embedded engine", loaded, embedded, langchain),
        Arm("LlamaIndex", OWN, applications.llamaindex_engine(nodes, engines.url), remote),
        await with_streamrag("LlamaIndex", "streamrag", remote, server, llamaindex),
        await with_streamrag("LlamaIndex", "streamrag, AppendMode", remote, server, growing),
        Arm("Haystack", OWN, applications.haystack_pipeline(documents, engines.url), remote),
        await with_streamrag("Haystack", "streamrag", remote, server, of_haystack),
    ]


async def measure(num_questions: int) -> list[dict[str, Any]]:
    pages = read_pages(ROOT / "docs")
    asked = questions(pages, num_questions)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))  # vLLM's sockets
        model = prepare(folder, pages)
        with console.status("starting vLLM's server and an embedded engine"):
            site_url = await stack.enter_async_context(serve_site(folder / "site"))
            engines = await stack.enter_async_context(start_engines(model, folder / "server.log"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=site_url, trust_env=False))
        arms = await make_arms(stack, engines, client, pages)
        answered: list[list[Answered]] = [[] for _ in arms]
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("questions", total=len(arms) * (len(asked) + 1))
            for number, question in enumerate([asked[-1], *asked]):
                for turn in range(len(arms)):
                    i = (number + turn) % len(arms)
                    answered[i].append(await ask(engines, arms[i], question))
                    progress.advance(task)
    of_own = {arm.framework: found[1:] for arm, found in zip(arms, answered, strict=True) if arm.name == OWN}
    return [row(arm, found[1:], of_own[arm.framework]) for arm, found in zip(arms, answered, strict=True)]


def prepare(folder: Path, pages: list[Page]) -> Path:
    """Write the site and the model."""
    (folder / "site").mkdir()
    for page in pages:
        (folder / "site" / page.name).write_text(page.text)
    corpus = [page.text for page in pages]
    return make_tiny_llama(folder / "model", corpus=corpus, max_model_len=SETTINGS["max_model_len"], **SIZES)


async def ask(engines: Engines, arm: Arm, question: str) -> Answered:
    await engines.forget()
    applications.asked.clear()
    texts, first_s = [], 0.0
    began_s = time.monotonic()
    async for text in arm.ask(question):
        first_s = first_s or (time.monotonic() if text else 0.0)
        texts.append(text)
    prompt = await engines.prompt_of(*applications.asked) if arm.backend is None else arm.backend.prompt
    return Answered(first_s - began_s, first_s - arm.site.ended_s, "".join(texts), prompt)


def row(arm: Arm, found: list[Answered], of_own: list[Answered]) -> dict[str, Any]:
    """What an arm did, compared with the framework's own."""
    pairs = list(zip(of_own, found, strict=True))
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
        write_whole(arguments.json, json.dumps(made, indent=2) + "\n")
    return check(found)


def check(found: list[dict[str, Any]]) -> int:
    """1 if an arm had another prompt than the framework's own, and says so."""
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
