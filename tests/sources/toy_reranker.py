"""Rerankers that need no model, and do whatever a test asks for; and others that are no good."""

import math
import os
import time
from pathlib import Path


def backwards(query: str, texts: list[str]) -> list[float]:
    """The later a text stands in the alphabet, the better: what the searches find says nothing about it.

    `rerank dies` and `rerank waits PATH` in the query are obeyed from the second batch on, `at once` from the first.
    """
    backwards.num_batches = getattr(backwards, "num_batches", 0) + 1
    if backwards.num_batches > 2 or "at once" in query:  # the first one is that of loading
        if "rerank dies" in query:
            os._exit(9)
        if "rerank fails" in query:
            raise LookupError("not that")
        if "rerank waits " in query:
            path = Path(query.partition("rerank waits ")[2].strip())
            path.with_suffix(".waiting").write_text(str(os.getpid()))
            while not path.exists():
                time.sleep(0.01)
    return [text_score(text) for text in texts]


def text_score(text: str) -> float:
    return float(int.from_bytes(text.encode()[:6].ljust(6, b"\0"), "big"))


def too_few(query: str, texts: list[str]) -> list[float]:
    return [1.0]


def not_numbers(query: str, texts: list[str]) -> list[float]:
    return [math.nan for _ in texts]


def failing(query: str, texts: list[str]) -> list[float]:
    raise LookupError("no scores today")
