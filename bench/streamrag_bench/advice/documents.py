"""The lengths of the documents that a span of retrieval returned, from its attributes and events."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from streamrag.support.bounded_reading import parse_json
from streamrag_bench.advice.events import Sizes

CHARS_PER_TOKEN = 4

NUMBERED = re.compile(r"retrieval\.documents\.(\d+)\.document\.(\w+)")  # OpenInference's
OUTPUTS = (
    "retrieval.documents", "gen_ai.retrieval.documents", "traceloop.entity.output", "gen_ai.task.output",
    "output.value", "mlflow.spanOutputs", "langfuse.observation.output", "gen_ai.completion",
)  # fmt: skip
"""Attributes whose JSON has the documents, the most exact first."""
LISTS = (
    "documents", "source_documents", "nodes", "source_nodes", "matches", "results", "points", "hits", "objects",
    "chunks", "passages", "context", "outputs", "output", "result", "kwargs",
)  # fmt: skip
"""Names under which frameworks return documents."""
TEXTS = ("page_content", "pageContent", "content", "text", "document", "node", "kwargs", "payload", "body", "chunk")
"""Names under which a document has its text, or the object that has it."""
RESULT_EVENTS = ("db.query.result", "db.search.result")  # OpenLLMetry's, one for each document of a vector database
MAX_DEPTH = 4


def document_sizes(attributes: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Sizes:
    """Return the tokens of each document, None for one without its text; None if the number is unknown."""
    texts: dict[int, str] = {}
    for name, value in attributes.items():
        if match := NUMBERED.fullmatch(name):
            text = str(value) if match[2] == "content" else ""
            texts[int(match[1])] = text or texts.get(int(match[1]), "")
    if texts:
        return tuple(_size(texts[number]) for number in sorted(texts))
    for name in OUTPUTS:
        if (documents := _documents_in(_parsed(attributes.get(name)), MAX_DEPTH)) is not None:
            return tuple(_size(_text_of(each, MAX_DEPTH)) for each in documents)
    if num_results := sum(each.get("name") in RESULT_EVENTS for each in events):
        return (None,) * num_results
    num_rows = attributes.get("db.response.returned_rows")
    return None if num_rows is None else (None,) * int(num_rows)


def _size(text: str) -> int | None:
    """Return the number of tokens of a text; None for an empty one, which was not recorded."""
    return max(len(text) // CHARS_PER_TOKEN, 1) if text else None


def _parsed(value: Any) -> Any:
    """Return the JSON in a text, or a value that is no text as it is; None for other text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, is_strict=False)
    except ValueError:
        return None


def _documents_in(value: Any, num_levels: int) -> list[Any] | None:
    """Return the list of documents in an output, also if it is a list of such lists; None if there is none."""
    if isinstance(value, list):
        is_nested = any(isinstance(each, list) for each in value)
        return [each for part in value for each in (part if isinstance(part, list) else [])] if is_nested else value
    if not isinstance(value, dict) or not num_levels:
        return None
    for name in LISTS:
        if (found := _documents_in(_parsed(value.get(name)), num_levels - 1)) is not None:
            return found
    count = value.get("count")
    return [None] * count if isinstance(count, int) and 0 < count <= 10_000 else None


def _text_of(value: Any, num_levels: int) -> str:
    """Return the text of a document; "" if it has none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not num_levels:
        return ""
    return next((text for name in TEXTS if (text := _text_of(value.get(name), num_levels - 1))), "")
