"""Which paragraphs the crawler takes for near-duplicates, rightly and wrongly, by the threshold.

The paragraphs are those of Python's own docstrings: some thousands, written by many, with many a template among them.
Each is changed in a way that leaves its meaning as it is, or does not, and asked for beside the unchanged ones.

    python experiments/near_duplicates.py
"""

import argparse
import inspect
import pkgutil
import random
import sys
from collections.abc import Callable
from importlib import import_module

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag.sources.pages import near_duplicates
from streamrag.sources.pages.near_duplicates import MIN_WORDS, NearDuplicates, words_of

MODULES = (
    "argparse asyncio collections concurrent.futures csv ctypes datetime decimal difflib email enum fractions ftplib"
)
MODULES += (
    " gzip html http imaplib inspect io ipaddress json logging mailbox multiprocessing numbers optparse os pathlib"
)
MODULES += " pickle random re shutil smtplib socket sqlite3 ssl statistics string subprocess tarfile tempfile textwrap"
MODULES += " threading tkinter turtle types typing unittest urllib uuid weakref xml zipfile"


def paragraphs() -> list[str]:
    """Different ones, long enough to be compared."""
    found: dict[str, None] = {}
    for name in MODULES.split():
        modules = [import_module(name)]
        for part in pkgutil.iter_modules(getattr(modules[0], "__path__", [])):
            if not part.name.startswith(("_", "test", "idlelib")):
                try:
                    modules.append(import_module(f"{name}.{part.name}"))
                except Exception:  # of another system
                    continue
        for module in modules:
            for thing in vars(module).values():
                things = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
                for text in filter(None, (inspect.getdoc(each) for each in things if callable(each))):
                    for paragraph in text.split("\n\n"):
                        words = words_of(paragraph)
                        if MIN_WORDS <= len(words) < 200:
                            found.setdefault(" ".join(words))
    return list(found)


def changed(words: list[str], at: int, to: str) -> str:
    return " ".join([*words[:at], *to.split(), *words[at + 1 :]])


def a_filler(words: list[str], choose: random.Random, others: list[str]) -> str:
    at = choose.randrange(len(words))
    return changed(words, at, f"{words[at]} {choose.choice(('also', 'then', 'just', 'here'))}")


def a_form(words: list[str], choose: random.Random, others: list[str]) -> str:
    at = max(range(len(words)), key=lambda i: len(words[i]))
    return changed(words, at, words[at].removesuffix("s") if words[at].endswith("s") else words[at] + "s")


def a_beginning(words: list[str], choose: random.Random, others: list[str]) -> str:
    return " ".join(["Note", "please", *words])


def a_number(words: list[str], choose: random.Random, others: list[str]) -> str:
    at = choose.randrange(len(words))
    return changed(words, at, f"{words[at]} {choose.randrange(100)}")


def a_negation(words: list[str], choose: random.Random, others: list[str]) -> str:
    at = choose.randrange(len(words))
    return changed(words, at, f"{words[at]} not")


def another_word(words: list[str], choose: random.Random, others: list[str]) -> str:
    at = max(range(len(words)), key=lambda i: (len(words[i]), choose.random()))
    return changed(words, at, choose.choice([word for word in others if word[:5] != words[at][:5]]))


SAME: dict[str, Callable[[list[str], random.Random, list[str]], str]] = {
    "a filling word more": a_filler,
    "another form of a word": a_form,
    "two words in front": a_beginning,
}
OTHER: dict[str, Callable[[list[str], random.Random, list[str]], str]] = {
    "a number more": a_number,
    "a negation more": a_negation,
    "another word in its longest one's place": another_word,
}


def is_alike(one: list[str], other: list[str]) -> bool:
    """What MinHash alone would say."""
    triples, others = near_duplicates.triples_of(one), near_duplicates.triples_of(other)
    return len(triples & others) >= near_duplicates.MIN_JACCARD * len(triples | others)


def share(known: NearDuplicates, texts: list[str]) -> str:
    num_found = sum(known.has(text) for text in texts)
    known._page_paragraphs.clear()
    return f"{num_found / len(texts):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=3000, metavar="N", help="paragraphs to look at (3000)")
    arguments = parser.parse_args()
    choose = random.Random(1)
    texts = paragraphs()
    choose.shuffle(texts)
    texts = texts[: arguments.most]
    long_words = sorted({word for text in texts for word in text.split() if len(word) > 6 and word.isalpha()})
    is_near_duplicate = near_duplicates.is_near_duplicate
    kinds = [(threshold, is_near_duplicate) for threshold in (0.5, 0.6, 0.7, 0.8, 0.9)]
    kinds.append((0.6, is_alike))
    table = Table(title=f"Taken for a near-duplicate, of {len(texts)} paragraphs of docstrings", title_justify="left")
    table.add_column("the paragraph and")
    rows: dict[str, list[str]] = {}
    for threshold, compare in track(kinds, "thresholds", transient=True, console=Console(file=sys.stderr)):
        table.add_column(f"{threshold}{'' if compare is is_near_duplicate else ', MinHash alone'}", justify="right")
        near_duplicates.MIN_JACCARD = threshold
        near_duplicates.is_near_duplicate = compare
        known = NearDuplicates()
        num_twins = 0
        for text in texts:
            num_twins += known.has(text)
            known.end_page()
        for name, change in {**SAME, **OTHER}.items():
            made = [change(text.split(), choose, long_words) for text in texts]
            rows.setdefault(name, []).append(share(known, made))
        rows.setdefault("the others as they are", []).append(f"{num_twins}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console().print(table)
    print(
        "The first three should be found, the others not. The last row counts paragraphs that are like an earlier one."
    )


if __name__ == "__main__":
    main()
