"""An embedder that needs no model, and does whatever a test asks for; and others that are no good."""

import os
import time
import zlib
from functools import cache
from pathlib import Path

import numpy as np

DIMENSION = 64


@cache
def _word(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(DIMENSION)


def embed(texts: list[str]) -> np.ndarray:
    """Texts that share words are near to each other. `die now` and `wait until PATH` are obeyed."""
    for text in texts:
        if "die now" in text:
            os._exit(9)
        if "wait until " in text:
            path = Path(text.partition("wait until ")[2].strip())
            path.with_suffix(".waiting").write_text(str(os.getpid()))
            while not path.exists():
                time.sleep(0.01)
    return np.stack([sum((_word(word) for word in text.lower().split()), start=_word("")) for text in texts])


def other(texts: list[str]) -> np.ndarray:
    return embed([text[::-1] for text in texts])


def wide(texts: list[str]) -> np.ndarray:
    return np.concatenate([embed(texts), embed(texts)], axis=1)


def flat(texts: list[str]) -> np.ndarray:
    return np.ones(DIMENSION)


def zeros(texts: list[str]) -> np.ndarray:
    return np.zeros((len(texts), DIMENSION))


def growing(texts: list[str]) -> np.ndarray:
    return np.ones((len(texts), DIMENSION + (len(texts) > 1)))


def failing(texts: list[str]) -> np.ndarray:
    raise LookupError("no embeddings today")
