"""The demo's folder: streamrag's documentation as a site and an index, and a small model.

folder/site         the documentation as HTML
folder/index        a vector index of the documentation
folder/model        SmolLM2, see `make_demo_model`, or a tiny Llama with random weights
"""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamrag.demo.smollm2 import GGUF_SHA256, INSTALL, PACKAGE, TAUGHT, make_demo_model
from streamrag.demo.tiny_llama import make_tiny_llama
from streamrag.errors import ConfigurationError, MissingDependencyError, install_line
from streamrag.modes import PromptTemplate
from streamrag.sources.index.build import build_index
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER

DOCS = (Path(__file__).parents[2] / "docs", Path(__file__).parents[1] / "docs")
"""The documentation in a checkout and in a wheel."""

PASSAGE_WORDS, NUM_PASSAGES, NUM_SENTENCES = 60, 2, 2
"""Search options. The small model answers best from a few single sentences; see docs/demo-model.md."""

TEMPLATE = PromptTemplate(system="Quote the sentence that answers the question, with its number in brackets, like [1].")
"""The prompt template that the small model was trained with."""

MAX_CONTEXT_TOKENS = 900  # tokens that a small model can attend to
MAX_MODEL_LEN = 8192
TINY: dict[str, Any] = {
    "hidden_size": 768,
    "num_layers": 4,
    "num_heads": 12,
    "vocab_size": 4096,
    "max_model_len": MAX_MODEL_LEN,
}

INSTALL_VLLM = install_line("vllm")
NEEDED = {
    "crawl4ai": install_line("crawl"),
    "markdown_it": install_line("embed"),
    "sentence_transformers": install_line("embed"),
    "gguf": INSTALL,
    PACKAGE: INSTALL,
    "vllm": INSTALL_VLLM,
}
"""Modules that the demo needs, and how to install each."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><nav>{links}</nav><main>{body}</main><footer>The documentation of streamrag.</footer></body></html>
"""

LINK = re.compile(r'<a href="([^"#]*)([^"]*)">(.*?)</a>', re.DOTALL)

OnStep: TypeAlias = Callable[[str, int, int], None]
"""A callback with the step's description, the number of items done, and their total."""


def docs_folder() -> Path:
    """Return the folder with the documentation in Markdown: the checkout's, else the wheel's."""
    return next(folder for folder in DOCS if (folder / "index.md").exists())


def written_pages(docs: Path) -> list[Path]:
    """Return the Markdown files in `docs`, without the generated reference."""
    return [page for page in sorted(docs.glob("*.md")) if page.name != "api.md"]


def build_site(docs: Path, site: Path) -> int:
    """Write an HTML page to `site` for each of `written_pages`, and return their number.

    :raises MissingDependencyError: markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise MissingDependencyError("markdown-it-py", NEEDED["markdown_it"]) from None

    site.mkdir(parents=True, exist_ok=True)
    render = MarkdownIt("commonmark").enable("table").render
    pages = written_pages(docs)
    links = " ".join(f'<a href="{page.stem}.html">{page.stem}</a>' for page in pages)
    for page in pages:
        text = page.read_text()
        title = text.splitlines()[0].lstrip("# ")
        body = LINK.sub(lambda link: _rewrite_link(link, docs), render(text))
        (site / f"{page.stem}.html").write_text(PAGE.format(title=title, links=links, body=body))
    return len(pages)


def _rewrite_link(link: re.Match[str], docs: Path) -> str:
    """Return the HTML link for the site: a file directly in `docs`, even a missing one, becomes .html with its
    fragment; a link to the web or within the page is unchanged; of a link to any other file, only the text is left."""
    file, fragment, text = link.groups()
    if "://" in file or not file:
        return link[0]
    return f'<a href="{file.removesuffix(".md")}.html{fragment}">{text}</a>' if (docs / file).parent == docs else text


def missing_for_demo(*, with_model: bool) -> list[tuple[str, str]]:
    """Return pairs of a package that is missing and how to install it; packages of the model only if `with_model`."""
    return [
        (name.replace("_", "-"), how)
        for name, how in NEEDED.items()
        if (with_model or how not in (INSTALL, INSTALL_VLLM)) and importlib.util.find_spec(name) is None
    ]


def demo_settings(folder: Path, *, with_model: bool) -> dict[str, Any]:
    """Return a service's settings by dotted name: index and prompt; `with_model` adds the model and its limits."""
    source_settings = {
        "source.index": folder / "index",
        "source.rerank": "late-interaction",
        "source.k": NUM_PASSAGES,
        "source.sentences": NUM_SENTENCES,
        "prompt.system": TEMPLATE.system,
        "prompt.max_context_tokens": MAX_CONTEXT_TOKENS,
        "limits.max_retrievals_ahead": 5,
    }
    model_settings = {
        "model.name": str(folder / "model"),
        "model.max_model_len": 4096,
        "model.served_name": "smollm2",
        "engine.kv_cache_bytes": 1 << 30,
        "answers.max_tokens": 128,
    }
    return source_settings | model_settings if with_model else source_settings


def prepare_demo(
    folder: Path, *, model: Literal["smollm2", "tiny"] | None = "smollm2", on_step: OnStep = lambda *step: None
) -> bool:
    """Create site, index and model in `folder` unless they are up to date; return whether they were created.

    Creation first removes those of an earlier call, and blocks for minutes. With None for `model`, no model is created.

    :raises ConfigurationError: `folder` has a site, index or model that no earlier call has made.
    :raises MissingDependencyError: a package is not installed.
    :raises StreamRagError: a step failed.
    """
    docs = docs_folder()
    texts = [path.read_text() for path in written_pages(docs)]
    made_from = [TINY, model, PASSAGE_WORDS, DEFAULT_EMBEDDER, GGUF_SHA256, sha256(TAUGHT.read_bytes()).hexdigest()]
    fingerprint = sha256("\0".join([*texts, json.dumps(made_from)]).encode()).hexdigest()
    stamp = folder / "made-from"
    if stamp.exists() and stamp.read_text() == fingerprint:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / name for name in ("site", "index", "model")]
    foreign = [part for part in parts if part.exists() and not stamp.exists()]
    if foreign:
        raise ConfigurationError(f"{foreign[0]} was not made for the demo and would be replaced: name another folder")
    stamp.write_text("unfinished")
    for part in parts:
        shutil.rmtree(part, ignore_errors=True)
    num_pages = build_site(docs, folder / "site")
    on_step(f"made a site of {num_pages} pages from the documentation", num_pages, num_pages)
    build_index(
        folder / "site",
        folder / "index",
        passage_words=PASSAGE_WORDS,
        on_progress=lambda num_done, total, step: on_step(f"index of the documentation: {step}", num_done, total),
    )
    if model == "tiny":
        make_tiny_llama(folder / "model", corpus=texts, **TINY)
        on_step("made a tiny Llama with random weights: it writes noise", 1, 1)
    elif model == "smollm2":
        make_demo_model(
            folder / "model", on_progress=lambda num_done, total, step: on_step(f"SmolLM2: {step}", num_done, total)
        )
    stamp.write_text(fingerprint)
    return True
