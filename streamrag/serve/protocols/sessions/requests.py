"""What clients ask of a session, by HTTP or by WebSocket: the schema, and how it is done."""

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
from streamrag.sessions.question import DECISIVE_GAP
from streamrag.sessions.session import MAX_WAITING
from streamrag.telemetry import Event

MAX_DATA = 500
"""Number of chunks that one request reads at most."""

AnswerTexts: TypeAlias = list[Annotated[str, Field(max_length=1000)]]


class OpenSession(StrictModel):
    """Options of a session."""

    system: str | None = Field(default=None, max_length=100_000)
    window_tokens: int | None = Field(default=None, ge=1)
    slide_share: float = Field(default=0.5, gt=0, lt=1)


class SystemText(StrictModel):
    """A system text that replaces the one before."""

    system: str = Field(max_length=100_000)


class DataChunk(StrictModel):
    """A chunk of data. Only its text is kept, and stands in the prompt: the limits do not count the rest."""

    text: str
    uri: str = ""
    title: str = ""


class Data(StrictModel):
    """Data to append, oldest first. At most as many as may wait, so that none displaces another of its request."""

    data: list[str | DataChunk] = Field(min_length=1, max_length=MAX_WAITING)
    flush: bool = False
    """Whether to respond only when the data are on the disk."""


class QuestionFields(StrictModel):
    """A base of questions to a session."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: AnswerTexts = Field(default_factory=list, max_length=64)
    """The only permitted answers; if there are none, any answer is."""
    with_gap: bool = False
    decisive_gap: float = Field(default=DECISIVE_GAP, ge=0, allow_inf_nan=False)
    max_tokens: int | None = None


class Question(QuestionFields):
    """A question to be answered once."""

    at_least: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    seed: int | None = None
    stream: bool = False


class WatchedQuestion(QuestionFields):
    """A question to be answered again whenever the data change."""

    every_s: float = Field(default=0.0, ge=0, le=86_400)
    priority: int = 0


async def append_data(service: Service, served: ServedSession, given: Data) -> dict[str, Any]:
    """Append all of the data or nothing, and return the version, and the number of chunks dropped so far.

    :raises RequestError: the session was closed; or a flush is asked for, and the service has no logs; or the disk does
        not take the data, which are in the session all the same.
    :raises ConfigurationError: there are more data than may wait.
    :raises SessionLogError: a chunk is too long for a log.
    :raises PipelineClosedError: the service is stopping.
    """
    if given.flush and served.log is None:
        raise RequestError("this service keeps no text of sessions: it has no session_log_dir", param="flush")
    chunks = [Chunk(each if isinstance(each, str) else each.text, "") for each in given.data]
    if served.log is not None:
        for chunk in chunks:
            served.log.check(chunk)
    version = 0
    flushed: dict[str, int] = {}
    try:
        version = await served.session.extend(chunks)
        if given.flush:
            flushed = {"flushed": await served.session.flush()}
    except PipelineClosedError as error:
        raise _end_of_session(service, error) from None
    except SessionLogError:
        if served.is_closed:
            raise _end_of_session(service, PipelineClosedError("the session was closed")) from None
        if (kept := served.session.state.log) is None or kept.error is None:
            raise
        what = f"version {version} is in the session, and not on the disk: {kept.error}"
        raise RequestError(what, status=503, code="session_log_failed") from None
    return {"version": version, "num_dropped": served.session.state.num_dropped, **flushed}


async def replace_system(service: Service, served: ServedSession, given: SystemText) -> dict[str, Any]:
    """Replace the system text, and return the first version that has it.

    :raises RequestError: the session was closed.
    :raises PromptTooLongError: the text leaves no room for a question.
    :raises PipelineClosedError: the service is stopping.
    """
    try:
        return {"version": await served.session.freeze(given.system)}
    except PipelineClosedError as error:
        raise _end_of_session(service, error) from None


async def answer_events(
    service: Service, caller: Caller, served: ServedSession, given: Question
) -> AsyncGenerator[Event, None]:
    """Yield the events of a question until it is answered.

    :raises RefusedError: there is no place for it.
    :raises RequestError: the session was closed.
    :raises StreamRagError: as `Session.ask_events` does.
    """
    params = service.answering(
        sampling(service.params, max_tokens=given.max_tokens, temperature=given.temperature, seed=given.seed)
    )
    options = given.model_dump(include={"answers", "at_least", "with_gap", "decisive_gap"})
    stream = served.session.ask_events(given.question, params=params, deadline_s=service.limits.deadline_s, **options)
    num_tokens = len(given.question)  # at most: the data before it are computed
    place = service.open(caller, "sessions", given.question, max_tokens=params.max_tokens, num_prompt_tokens=num_tokens)
    with served.in_use():
        async with place as opened, stream as events:
            try:
                async for event in opened.noted(events):
                    yield event
            except PipelineClosedError as error:
                raise _end_of_session(service, error) from None


def _end_of_session(service: Service, error: PipelineClosedError) -> StreamRagError:
    """Return the error for a session that has ended: it may be there again if the service restarts, else it is gone."""
    return error if service.admission.is_draining else session_not_found("the session was closed")


def state_of(served: ServedSession) -> dict[str, Any]:
    """Return the state of a session, as its client sees it."""
    watches = {name: watch.question[:MAX_SHOWN] for name, (watch, _) in sorted(served.watches.items())}
    return {"id": served.id, **asdict(served.session.state), "watches": watches}


async def newest_data(served: ServedSession, behind: str) -> dict[str, Any]:
    """Return the newest data in the window behind this version, with their versions.

    :raises RequestError: `behind` is not a version.
    """
    data = await served.session.newest(behind=parse_id(behind, "behind"), at_most=MAX_DATA)
    return {"data": [{"version": version, "text": text} for version, text in data]}


def parse_id(text: str, param: str) -> int:
    """Return the id of the last event that a client has seen, or a version.

    :raises RequestError: the text is not such a number.
    """
    if not (text.isdecimal() and len(text) < 19):
        raise RequestError(f"{param} must be a whole number", param=param)
    return int(text)
