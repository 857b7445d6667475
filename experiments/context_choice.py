"""Which pages are in the context when not all of them fit, and does it hold the answer?

streamrag's own documentation, whole pages, in eight random orders of arrival; the demo's questions, and for each the
words by which one of the pages answers it. No engine and no crawl: what is asked is what stands in the prompt.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrag import Chunk, PromptTemplate
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.modes import PromptAssembler
from streamrag.query.relevance import Relevance
from streamrag.testing import make_tiny_llama

DOCS = Path(__file__).resolve().parent.parent / "docs"
ANSWERS = {
    "How do I stop a query early, and what is freed?": "When the block has been left nothing is running on its behalf",
    "Why does the question stand last in the prompt?": "Whatever stands behind the context cannot be prefilled before",
    "What happens when a page never ends or is too large?": "A page that never ends costs its own time",
    "When does streaming the context not help?": "Retrieval is one quick step",
    "How does a search refine its result in stages?": "So a search is a ladder of lists that grow",
}
ARMS = {
    "by arrival": {"relevance": False, "reserve_fraction": 0.0},
    "shortened": {"relevance": True, "reserve_fraction": 0.0},
    "shortened, late pages": {"relevance": True, "reserve_fraction": 0.25},
}
BUDGETS = (1024, 2048, 4096, 8192)
NUM_ORDERS = 8


@dataclass(frozen=True)
class Result:
    """One question in one order."""

    has_answer: bool
    num_pages: int
    num_computed: int
    """Tokens that are computed when every page is prefilled as it arrives."""
    num_late: int
    """Those of them that are computed after retrieval has ended."""


def ask(
    question: str, pages: list[Chunk], tokenizer: HuggingFaceTokenizer, budget: int, arm: dict[str, float]
) -> Result:
    assembler = PromptAssembler(
        tokenizer,
        PromptTemplate(),
        question,
        max_model_len=1 << 20,
        max_tokens=256,
        max_context_tokens=budget,
        relevance=Relevance(question) if arm["relevance"] else None,
        reserve_fraction=arm["reserve_fraction"],
    )
    num_computed = 0
    for end in range(len(pages) + 1):
        prompt = assembler.assemble(pages[:end], is_complete=False, is_ranked=False).prompt
        num_computed += len(prompt.token_ids) - prompt.num_shared
    last = assembler.assemble(pages, is_complete=True, is_ranked=False)
    num_late = len(last.prompt.token_ids) - last.prompt.num_shared
    text = " ".join(" ".join(chunk.text for chunk in last.included).split())
    return Result(ANSWERS[question] in text, len(last.included), num_computed + num_late, num_late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    texts = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name != "api.md"}
    pages = [Chunk(text, name, text.splitlines()[0].lstrip("# ")) for name, text in texts.items()]
    for answer in ANSWERS.values():
        assert any(answer in " ".join(text.split()) for text in texts.values()), f"no page says {answer!r} any more"
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "model", corpus=list(texts.values()), vocab_size=4096)
        tokenizer = HuggingFaceTokenizer(model)
    orders = [random.Random(seed).sample(pages, len(pages)) for seed in range(NUM_ORDERS)]
    rows = []
    for budget in BUDGETS:
        for name, arm in ARMS.items():
            found = [ask(question, order, tokenizer, budget, arm) for question in ANSWERS for order in orders]
            rows.append(
                {
                    "max_context_tokens": budget,
                    "arm": name,
                    "has_answer": statistics.mean(result.has_answer for result in found),
                    "num_pages": statistics.mean(result.num_pages for result in found),
                    "num_computed": statistics.mean(result.num_computed for result in found),
                    "num_late": statistics.mean(result.num_late for result in found),
                }
            )
    table = Table("budget", "", "has the answer", "pages", "tokens computed", "of these after retrieval")
    for row in rows:
        numbers = (f"{row['has_answer']:.0%}", *(f"{row[n]:.1f}" for n in ("num_pages", "num_computed", "num_late")))
        table.add_row(str(row["max_context_tokens"]), str(row["arm"]), *numbers)
    Console().print(table)
    lengths = [len(tokenizer.encode(page.text)) for page in pages]
    print(f"{len(pages)} pages of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    if arguments.json:
        measured = {"num_pages": len(pages), "num_tokens": sum(lengths), "rows": rows}
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
