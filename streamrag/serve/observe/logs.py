"""The log of a service: one line per query, and the query's id in every line that is logged on its behalf.

    {"time": "2026-11-23T02:03:04.567Z", "level": "info", "logger": "streamrag.serve.queries", "request_id": "8f0c…",
     "message": "answered", "interface": "chat", "client": "ada", "status": 200, "total_s": 1.93, "ttft_s": 0.84, …}

Questions and answers are logged only if the operator enables it. Otherwise the question is redacted from every line,
for example from the URL of a search engine.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from textwrap import indent
from typing import Any, Literal, TextIO, TypeAlias
from urllib.parse import quote, quote_plus

from streamrag.display_text import one_line, sanitize
from streamrag.serve.failures import failure_of
from streamrag.serve.observe.observer import FailedRequest, Observer, QueryOutcome, ServedQuery, current_query
from streamrag.telemetry import Answer

Form: TypeAlias = Literal["json", "text"]

QUERY_LOGGER = "streamrag.serve.queries"  # logger of the lines whose message is the outcome of a query

log = logging.getLogger(QUERY_LOGGER)

FIELDS = "streamrag_fields"  # attribute of a log record with further values
QUESTION = "streamrag_question"  # attribute of a log record with the question to redact

QUERY_OF_ERROR = "streamrag_query"
"""Attribute of an error with the query that it ended: the server logs the error outside of the query's context."""

MAX_REFUSED = 10
"""Lines about refused requests of one client in a minute: a hostile client can neither fill the disk nor bury the lines
of others. Metrics count all."""
MINUTE_S = 60.0
MAX_PARAM = 80  # characters of a refused request's invalid field, which the client may have named

HIDDEN = "[question]"
QUOTING = ("reason", "source_error", "cut_short")
"""Fields that may quote a question. Other fields are not redacted: a question about a client must not hide its name."""
MAX_CHARACTERS = 2_000  # maximum characters of one value; a traceback may have ten times as many
MIN_HIDDEN = 4  # minimum characters of a question that is redacted: shorter ones are part of too many words

CHATTY = ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "sse_starlette", "vllm")
"""Loggers that log addresses and content for each request, and vLLM's, which logs each step of its start."""

TIMES_S = ("queued_s", "retrieval_s", "ttft_s", "ttft_after_retrieval_s")
COUNTS = (
    "num_chunks", "num_skipped", "num_prompts", "num_updates",
    "num_prompt_tokens", "num_invalidated", "num_output_tokens",
)  # fmt: skip
ENGINE_COUNTS = ("num_computed", "num_recomputed", "num_from_cache", "num_loaded")


class QueryLog(Observer):
    """An observer that logs the end of each query, and requests that are refused, `MAX_REFUSED` of a client a minute.

    with_text: whether to log questions and answers.
    """

    def __init__(self, *, with_text: bool = False) -> None:
        self._with_text = with_text
        self._minute = 0
        self._num_refused: Counter[str] = Counter()  # by client, in this minute

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """Log the end of a query in one line, and attach the query to the error, for later lines about that error.

        The line is an error if the service failed, then with traceback, or the engine died; a warning if source or
        backend failed; else info.
        """
        fields = {**_query_fields(query), **_error_fields(outcome, error)}
        if answer is not None:
            fields |= _answer_fields(answer)
        if self._with_text:
            fields |= {"question": query.text, "answer": None if answer is None else answer.text}
        if error is not None:
            setattr(error, QUERY_OF_ERROR, query)
        is_ours = outcome in ("internal_error", "engine_dead")
        log.log(
            logging.ERROR if is_ours else logging.WARNING if outcome.endswith("_error") else logging.INFO,
            outcome,
            exc_info=error if outcome == "internal_error" else None,
            extra={FIELDS: fields, "request_id": query.id, QUESTION: "" if self._with_text else query.text},
        )

    def request_failed(self, request: FailedRequest) -> None:
        """Log a request that was refused: at level info if the client has to change it, else as a warning."""
        if request.is_logged:
            return
        if (minute := int(time.monotonic() / MINUTE_S)) != self._minute:
            self._minute = minute
            self._num_refused.clear()
        self._num_refused[request.client] += 1
        if (num := self._num_refused[request.client]) > MAX_REFUSED:
            return
        param = request.param and request.param[:MAX_PARAM]
        fields = {"route": request.route, "client": request.client, "status": request.status, "reason": request.code}
        fields |= {"param": param, "is_last_of_minute": num == MAX_REFUSED or None}
        level = logging.WARNING if request.status in (429, 503) else logging.INFO
        log.log(level, "refused", extra={FIELDS: fields, "request_id": request.id})


def _query_fields(query: ServedQuery) -> dict[str, Any]:
    """Return a query's fields for the log: interface, client, times in seconds, counts, and how it overlapped."""
    times_s = {"total_s": query.age_s} | {name: getattr(query.progress, name) for name in TIMES_S}
    overlap = query.progress.overlap
    return {
        "interface": query.interface,
        "client": query.client,
        **{name: None if time_s is None else round(time_s, 4) for name, time_s in times_s.items()},
        **{name: getattr(query.progress, name) for name in COUNTS},
        "overlap": None if overlap is None else overlap.way,
    }


def _answer_fields(answer: Answer) -> dict[str, Any]:
    """Return an answer's fields for the log: finish reason, failures of retrieval, the engine's counts if recorded."""
    fields: dict[str, Any] = {"finish_reason": answer.finish_reason, "cut_short": answer.cut_short}
    if answer.source_error is not None:
        fields["source_error"] = str(answer.source_error)
    if record := answer.record:
        fields |= {name: getattr(record, name) for name in ENGINE_COUNTS}
        fields["num_preemptions"] = len(record.preemptions)
    return fields


def _error_fields(outcome: QueryOutcome, error: BaseException | None) -> dict[str, Any]:
    """Return the status that the client got, 499 if it left; after other errors, also the error's type and text."""
    if outcome == "answered":
        return {"status": 200}
    if outcome == "left" or error is None:
        return {"status": 499}  # nginx's status for a client that has disconnected
    return {"status": failure_of(error).status, "error": type(error).__name__, "reason": str(error)}


class _WithQuery(logging.Filter):
    """A filter that adds a line's query, the current task's or that of the logged error, and drops no line."""

    def filter(self, record: logging.LogRecord) -> bool:
        query = current_query.get()
        if query is None and record.exc_info:
            query = getattr(record.exc_info[1], QUERY_OF_ERROR, None)
        if not hasattr(record, "request_id"):
            record.request_id = None if query is None else query.id
        if not hasattr(record, QUESTION):
            setattr(record, QUESTION, "" if query is None else query.text)
        return True


class _Formatter(logging.Formatter):
    """A base of formatters that lists the values of a line, without the question unless `with_text`."""

    def __init__(self, *, with_text: bool) -> None:
        super().__init__()
        self._with_text = with_text

    def values(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of a line, but no None.

        The message (not an outcome), `QUOTING` fields and traceback are cut, and redacted unless `with_text`.
        """
        question = "" if self._with_text else getattr(record, QUESTION, "")
        yield "time", f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        yield "level", record.levelname.lower()
        yield "logger", record.name
        if request_id := getattr(record, "request_id", None):
            yield "request_id", request_id
        message = record.getMessage()
        yield "message", message if record.name == QUERY_LOGGER else hide(message, question)[:MAX_CHARACTERS]
        for name, value in getattr(record, FIELDS, {}).items():
            if value is not None:
                is_text = isinstance(value, str) and name in QUOTING
                yield name, hide(value, question)[:MAX_CHARACTERS] if is_text else value
        if record.exc_info and record.exc_info[0] is not None:
            traceback = hide(self.formatException(record.exc_info), question)
            yield "traceback", traceback[-10 * MAX_CHARACTERS :]


class JsonFormatter(_Formatter):
    """A formatter of JSON lines in ASCII, without line breaks or terminal escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(dict(self.values(record)), separators=(",", ":"), default=str)


class TextFormatter(_Formatter):
    """A formatter for terminals, with name=value. Tracebacks are indented: nothing in them looks like a log line."""

    def format(self, record: logging.LogRecord) -> str:
        values = dict(self.values(record))
        traceback = values.pop("traceback", None)
        first = f"{values.pop('time')[11:23]} {values.pop('level'):7} {values.pop('logger').removeprefix('streamrag.')}"
        message = one_line(str(values.pop("message")))
        line = f"{first}: {message} " + " ".join(f"{name}={one_line(str(value))}" for name, value in values.items())
        return line.rstrip() + (f"\n{indent(sanitize(traceback), '  ')}" if traceback else "")


def hide(text: str, question: str) -> str:
    """Return `text` with the question redacted in any letter case, also URL-encoded or escaped. Takes linear time.

    A question of fewer than `MIN_HIDDEN` characters is not redacted.
    """
    stripped = question.strip()
    if len(stripped) < MIN_HIDDEN or len(stripped) > len(text):  # no form is shorter than the question
        return text
    forms = {stripped, quote(stripped), quote_plus(stripped), quote(stripped, safe=""), repr(stripped)[1:-1]}
    parts = [text]
    for form in sorted(map(_lower, forms), key=len, reverse=True):
        parts = [piece for part in parts for piece in _split(part, form)]
    return HIDDEN.join(parts)


def _split(text: str, form: str) -> list[str]:
    """Return the pieces of `text` around each occurrence of `form`, which is in lower case; letter case is ignored."""
    lower, pieces, start = _lower(text), [], 0
    while (index := lower.find(form, start)) >= 0:
        pieces.append(text[start:index])
        start = index + len(form)
    return [*pieces, text[start:]]


def _lower(text: str) -> str:
    """Return `text` in lower case, at the same length: a letter whose lower case is longer stays."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(small if len(small := letter.lower()) == 1 else letter for letter in text)


def log_to(stream: TextIO, *, form: Form = "json", with_text: bool = False) -> None:
    """Log everything from INFO on in this process to `stream`, in place of the handlers set up before.

    with_text: whether log lines may contain questions. `CHATTY` loggers, such as httpx, log only warnings in any case.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(with_text=with_text) if form == "json" else TextFormatter(with_text=with_text))
    handler.addFilter(_WithQuery())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
