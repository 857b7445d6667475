"""The schema of session requests, over HTTP or WebSocket, and their execution."""

from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from streamrag.core import Chunk
from streamrag.errors import PipelineClosedError, SessionLogError, StreamRagError
from streamrag.query.options import MAX_QUERY_CHARACTERS
from streamrag.serve.connections.json_body import StrictModel
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.request_fields import sampling
from streamrag.serve.service import Service
from streamrag.serve.session_store.served_session import MAX_SHOWN, ServedSession
from streamrag.serve.session_store.store import session_not_found
from streamrag.sessions.limits import MAX_WAITING
from streamrag.sessions.question_options import DECISIVE_MARGIN
from streamrag.telemetry import QueryEvent

AnswerTexts: TypeAlias = list[Annotated[str, Field(max_length=1000)]]


class OpenSession(StrictModel):
    """Options of a session."""

    system: str | None = Field(default=None, max_length=100_000)
    window_tokens: int | None = Field(default=None, ge=1)
    slide_share: float = Field(default=0.5, gt=0, lt=1)


class SystemText(StrictModel):
    """A new system text."""

    system: str = Field(max_length=100_000)


class DataChunk(StrictModel):
    """A chunk of data. Only its text is kept, because only text counts toward the limits."""

    text: str
    uri: str = ""
    title: str = ""


class Data(StrictModel):
    """Data to append, oldest first. The session's queue has room for all of one request."""

    data: list[DataChunk | str] = Field(min_length=1, max_length=MAX_WAITING)
    flush: bool = False  # whether to respond only after the data were written to disk


class QuestionFields(StrictModel):
    """The fields of all questions to a session."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: AnswerTexts = Field(default_factory=list, max_length=64)
    """The permitted answers; if empty, the answer is free."""
    with_margin: bool = False
    decisive_margin: float = Field(default=DECISIVE_MARGIN, ge=0, allow_inf_nan=False)
    max_tokens: int | None = None


class QuestionBody(QuestionFields):
    """A question that is answered once."""

    at_least: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    seed: int | None = None
    stream: bool = False


class WatchedQuestion(QuestionFields):
    """A question that is answered whenever the data change."""

    min_interval_s: float = Field(default=0.0, ge=0, le=86_400)
    priority: int = 0


async def append_data(service: Service, served: ServedSession, request: Data) -> dict[str, Any]:
    """Append all of the data or none. Return version, total number of dropped chunks and, if flushed, version on disk.

    Raises `closed_error` if the session is closed, SessionLogError before appending if a chunk is too long for the log,
    and RequestError if the service has no logs to flush, or if the data are in the session but not on disk.
    """
    if request.flush and served.log is None:
        raise RequestError("this service does not store sessions: it has no session_log_dir", param="flush")
    chunks = [Chunk(each if isinstance(each, str) else each.text, "") for each in request.data]
    if served.log is not None:
        for chunk in chunks:
            served.log.check(chunk)
    version = 0
    flushed: dict[str, int] = {}
    try:
        version = await served.session.extend(chunks)
        if request.flush:
            flushed = {"flushed": await served.session.flush()}
    except PipelineClosedError as error:
        raise closed_error(service, error) from None
    except SessionLogError:
        if served.is_closed:
            raise closed_error(service, PipelineClosedError("the session was closed")) from None
        if (log := served.session.state.log) is None or log.error is None:
            raise
        what = f"version {version} is in the session but not on disk: {log.error}"
        raise RequestError(what, status=503, code="session_log_failed") from None
    return {"version": version, "num_dropped": served.session.state.num_dropped, **flushed}


async def answer_events(
    service: Service, caller: Caller, served: ServedSession, question: QuestionBody
) -> AsyncGenerator[QueryEvent, None]:
    """Admit a question and yield its events until it is answered; raise `closed_error` if the session is closed."""
    params = service.cap_params(
        sampling(service.params, max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed)
    )
    options = question.model_dump(include={"answers", "at_least", "with_margin", "decisive_margin"})
    stream = served.session.ask_events(
        question.question, params=params, deadline_s=service.limits.deadline_s, **options
    )
    num_tokens = len(question.question)  # an upper bound: the data are already prefilled
    place = service.open(
        caller, "sessions", question.question, max_tokens=params.max_tokens, num_prompt_tokens=num_tokens
    )
    with served.in_use():
        async with place as opened, stream.observe(opened.note) as events:
            try:
                async for event in events:
                    yield event
            except PipelineClosedError as error:
                raise closed_error(service, error) from None


def closed_error(service: Service, error: PipelineClosedError) -> StreamRagError:
    """Return the error for a closed session: `error` while the service stops, after which it may resume, else a 404."""
    return error if service.admission.is_draining else session_not_found("the session was closed")


def encode_state(served: ServedSession) -> dict[str, Any]:
    """Return the state of a session for its client."""
    watches = {name: watch.question[:MAX_SHOWN] for name, (watch, _) in sorted(served.watches.items())}
    return {"id": served.id, **asdict(served.session.state), "watches": watches}


def parse_id(text: str, param: str) -> int:
    """Return an event id or a version. Raises RequestError if the text is not a number of at most 18 digits."""
    if not (text.isdecimal() and len(text) < 19):
        raise RequestError(f"{param} must be a whole number", param=param)
    return int(text)
