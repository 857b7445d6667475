"""Documents to index, and what exact search finds in an index of `toy_embedder`."""

import json
import random
from hashlib import sha256
from pathlib import Path

import numpy as np
from toy_embedder import embed

from streamrag.sources.index.build import build_index

EMBEDDER = "toy_embedder:embed"
QUERIES = [" ".join(f"w{(13 * number + 7 * place) % 1000}" for place in range(12)) for number in range(20)]


def write_documents(folder: Path, num_documents: int, *, seed: int = 0) -> Path:
    """Each is one passage of twelve words out of a thousand."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_documents):
        words = " ".join(f"w{chance.randrange(1000)}" for _ in range(12))
        (folder / f"{number:04}.txt").write_text(words)
    return folder


def build_toy_index(folder: Path, num_documents: int, *, name: str = "index") -> Path:
    """An index in `folder`."""
    out = folder / name
    build_index(write_documents(folder / f"{name}-documents", num_documents), out, embedder=EMBEDDER)
    return out


def exact_ranking(index: Path, query: str) -> list[tuple[str, float]]:
    """All documents with their cosine similarities, best first."""
    passages = [json.loads(line) for line in (index / "passages.jsonl").read_text().splitlines()]
    vectors = embed([f"{fields['title']}\n{fields['text']}" for fields in passages])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    (wanted,) = embed([query])
    scores = vectors @ (wanted / np.linalg.norm(wanted))
    return [(passages[i]["uri"], float(scores[i])) for i in np.argsort(-scores, kind="stable")]


def resign(index: Path, **fields: object) -> None:
    """Make the manifest agree with the files as they are now."""
    manifest = json.loads((index / "manifest.json").read_text())
    for name in manifest["files"]:
        body = (index / name).read_bytes()
        manifest["files"][name] = {"size_bytes": len(body), "sha256": sha256(body).hexdigest()}
    (index / "manifest.json").write_text(json.dumps(manifest | fields))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
