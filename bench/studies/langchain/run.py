"""What a LangChain retriever gains from streamrag: one that returns its list at once, and the same in stages.

    python -m studies.langchain.run [--json FILE]

The same three searches are asked in all arms: by words (0.05 s), by letters in place of vectors (0.4 s), and a
reranker of both (0.4 s more), whose six documents are the answer's. The times are sleeps: they stand for a database
and a model elsewhere. Each question is asked in all arms, in turns, with an empty prefix cache. `list, then prompt`
waits for all documents and then asks, as LangChain does; the other arms are compared with it pair by pair. An embedded
engine on the CPU, random weights: the answers mean nothing, the work is real.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from rank_bm25 import BM25Okapi
from rich.console import Console
from rich.table import Table

from streamrag import AppendMode, SamplingParams, UpdateMode, VllmBackend
from streamrag.adapters.langchain import StreamragChatModel, staged_retriever
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.provenance import versions
from studies.folders import DOCS

NUM_CHARS = (500, 1_800)
"""Sections of the documentation with fewer are left out, of longer ones the first paragraphs are taken."""
NUM_DOCUMENTS = 6
WORDS_S, LETTERS_S, RERANK_S = 0.05, 0.4, 0.4
SIZES: dict[str, Any] = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 4_096}
ENGINE_ARGS = {"dtype": "float32", "block_size": 32, "enforce_eager": True}
SETTINGS: dict[str, Any] = {"max_model_len": 8_192, "kv_cache_bytes": 1 << 29}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = ChatPromptTemplate.from_template(
    "Answer the question from these documents.\n\n{context}\n\nQuestion: {question}"
)


@dataclass(frozen=True)
class Page:
    """A section of the documentation."""

    name: str
    title: str
    text: str


def read_pages() -> Iterator[Page]:
    for path in sorted(DOCS.glob("*.md")):
        for number, section in enumerate(re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]):
            title, _, body = section.partition("\n")
            text = body.strip()
            if len(text) > NUM_CHARS[1]:
                text = text[: NUM_CHARS[1]].rpartition("\n\n")[0].strip()
            if len(text) >= NUM_CHARS[0]:
                yield Page(f"{path.stem}-{number}.txt", title, text)


class Searches:
    """Three searches of the same pages."""

    def __init__(self, pages: list[Page]) -> None:
        self._documents = [Document(page.text, metadata={"source": page.name, "title": page.title}) for page in pages]
        texts = [f"{page.title} {page.text}".lower() for page in pages]
        self._words = BM25Okapi([text.split() for text in texts])
        self._letters = BM25Okapi([_letters(text) for text in texts])

    async def by_words(self, query: str) -> list[Document]:
        await asyncio.sleep(WORDS_S)
        return self._best(self._words.get_scores(query.lower().split()))

    async def by_letters(self, query: str) -> list[Document]:
        await asyncio.sleep(LETTERS_S)
        return self._best(self._letters.get_scores(_letters(query.lower())))

    async def rerank(self, query: str, documents: list[Document]) -> list[Document]:
        await asyncio.sleep(RERANK_S)
        words, letters = (
            self._words.get_scores(query.lower().split()),
            self._letters.get_scores(_letters(query.lower())),
        )
        return self._best(words / max(words) + letters / max(letters))

    async def at_once(self, query: str) -> list[Document]:
        """The whole search as one function, which returns when the reranker has."""
        _, documents = await asyncio.gather(self.by_words(query), self.by_letters(query))
        return await self.rerank(query, documents)

    def _best(self, scores: Any) -> list[Document]:
        best = sorted(range(len(self._documents)), key=lambda i: -scores[i])
        return [self._documents[i] for i in best[:NUM_DOCUMENTS]]


def _letters(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(len(text) - 3)]


async def measure(num_questions: int) -> list[dict[str, Any]]:
    pages = list(read_pages())
    searches = Searches(pages)
    stages = searches.by_words, searches.by_letters, searches.rerank
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus = [page.text for page in pages]
        model = make_tiny_llama(folder / "model", corpus=corpus, max_model_len=SETTINGS["max_model_len"], **SIZES)
        backend = VllmBackend(
            model, **SETTINGS, engine_args={"dtype": "float32", "block_size": 32, "enforce_eager": True}
        )
        stack.push_async_callback(backend.aclose)
        await backend.start(lambda line: None)

        def chat(retriever: Any, mode: Any = None) -> StreamragChatModel:
            return StreamragChatModel.from_retriever(retriever, backend, PROMPT, mode=mode)

        arms: dict[str, tuple[StreamragChatModel, dict[str, Any]]] = {
            "list, then prompt": (chat(staged_retriever(searches.at_once)), {"overlap": False}),
            "list at once": (chat(staged_retriever(searches.at_once)), {"overlap": True}),
            "stages, UpdateMode()": (chat(staged_retriever(*stages)), {"overlap": True}),
            'stages, UpdateMode(order="stable")': (
                chat(staged_retriever(*stages), UpdateMode(order="stable")),
                {"overlap": True},
            ),
            "stages, AppendMode()": (chat(staged_retriever(*stages), AppendMode()), {"overlap": True}),
        }
        for made, _ in arms.values():
            await stack.enter_async_context(made)
        titles = list(dict.fromkeys(page.title for page in pages))
        asked = [f"What does the documentation say about this: {title}?" for title in titles[:num_questions]]
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in arms}
        names = list(arms)
        for number, question in enumerate([asked[-1], *asked]):
            for turn in range(len(names)):
                name = names[(number + turn) % len(names)]
                await backend.reset_prefix_cache()
                answered = await ask(*arms[name], question)
                if number:  # the first question warms up
                    found[name].append(answered)
        return [row(name, found[name], found["list, then prompt"]) for name in names]


async def ask(model: StreamragChatModel, options: dict[str, Any], question: str) -> tuple[float, float, int]:
    """Seconds from the question to the first token, and from the end of retrieval; tokens of the prompt."""
    first_s = 0.0
    last: Any = None
    began_s = time.monotonic()
    async for chunk in model.astream(question, params=PARAMS, **options):
        first_s, last = first_s or time.monotonic() - began_s, chunk
    return first_s, last.response_metadata["timings"]["ttft_after_retrieval_s"], last.usage_metadata["input_tokens"]


def row(name: str, found: list[tuple[float, float, int]], base: list[tuple[float, float, int]]) -> dict[str, Any]:
    ratios = [median(one[i] / other[i] for one, other in zip(base, found, strict=True)) for i in range(2)]
    return {
        "arm": name,
        "num_questions": len(found),
        "ttft_s": median(each[0] for each in found),
        "ttft_after_retrieval_s": median(each[1] for each in found),
        "num_prompt_tokens": median(each[2] for each in found),
        "ttft_ratio": ratios[0],
        "ttft_after_retrieval_ratio": ratios[1],
        "all": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=40, help="of each arm (default: 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.questions))
    table = Table(title="Medians; ratios of pairs with the first arm")
    for column in ("arm", "first token, s", "ratio", "after retrieval, s", "ratio", "prompt, tokens"):
        table.add_column(column)
    for each in results:
        after_s = each["ttft_after_retrieval_s"]
        ratios = f"{each['ttft_ratio']:.2f}x", f"{each['ttft_after_retrieval_ratio']:.2f}x"
        table.add_row(
            each["arm"], f"{each['ttft_s']:.2f}", ratios[0], f"{after_s:.2f}", ratios[1], str(each["num_prompt_tokens"])
        )
    Console(width=120).print(table)
    if arguments.json:
        made = {
            "command": "make -C bench langchain",
            "machine": {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()},
            "versions": versions(),
            "model": SIZES,
            "engine": SETTINGS,
            "retrieval_s": {"by words": WORDS_S, "by letters": LETTERS_S, "reranking": RERANK_S},
            "results": results,
        }
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
