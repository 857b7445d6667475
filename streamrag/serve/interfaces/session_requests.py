"""What clients ask of a session, whichever way they do: checked, and done."""

from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from streamrag.asked import MAX_QUERY_CHARACTERS
from streamrag.core import Chunk
from streamrag.errors import PipelineClosedError, SessionLogError, StreamRagError
from streamrag.serve.bodies import StrictModel, sampling
from streamrag.serve.failures import RequestError
from streamrag.serve.interfaces.session_store import MAX_SHOWN, Held, gone
from streamrag.serve.service import Caller, Service
from streamrag.sessions.question import DECISIVE_GAP
from streamrag.sessions.session import MAX_WAITING
from streamrag.telemetry import Event

MAX_DATA = 500
"""Chunks that are read at a time."""

Answers: TypeAlias = list[Annotated[str, Field(max_length=1000)]]
"""The only answers there may be; any, if there are none."""

DecisiveGap: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OpenSession(StrictModel):
    """Options of a session."""

    system: str | None = Field(default=None, max_length=100_000)
    window_tokens: int | None = Field(default=None, ge=1)
    slide_share: float = Field(default=0.5, gt=0, lt=1)


class Frozen(StrictModel):
    """A system text that takes the other's place."""

    system: str = Field(max_length=100_000)


class Datum(StrictModel):
    """A chunk of data. Its text alone is in the prompt, and kept: what nothing counts would grow without bounds."""

    text: str
    uri: str = ""
    title: str = ""


class Data(StrictModel):
    """Data to append, oldest first. No more than may wait: none of a request is dropped for the rest of it."""

    data: list[str | Datum] = Field(min_length=1, max_length=MAX_WAITING)
    flush: bool = False
    """Whether to answer once they are on the disk."""


class Question(StrictModel):
    """A question to a session."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: Answers = Field(default_factory=list, max_length=64)
    with_gap: bool = False
    decisive_gap: DecisiveGap = DECISIVE_GAP
    at_least: int | None = Field(default=None, ge=0)
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stream: bool = False


class WatchedQuestion(StrictModel):
    """A question that is to be kept answered."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: Answers = Field(default_factory=list, max_length=64)
    every_s: float = Field(default=0.0, ge=0, le=86_400)
    priority: int = 0
    max_tokens: int | None = None
    with_gap: bool = False
    decisive_gap: DecisiveGap = DECISIVE_GAP


async def appended(service: Service, held: Held, given: Data) -> dict[str, Any]:
    """Append data, all of it or nothing, and say which version that makes, and how many chunks were dropped so far.

    :raises RequestError: the session was closed; they are to be flushed, and the service keeps no text; or the disk
        does not take them, and they are in the session all the same.
    :raises ConfigurationError: they are more than may wait at once.
    :raises SessionLogError: one is too long for a log.
    :raises PipelineClosedError: the service is stopping.
    """
    if given.flush and held.log is None:
        raise RequestError("this service keeps no text of sessions: it has no session_log_dir", param="flush")
    chunks = [Chunk(each if isinstance(each, str) else each.text, "") for each in given.data]
    if held.log is not None:
        for chunk in chunks:
            held.log.check(chunk)
    version = 0
    flushed: dict[str, int] = {}
    try:
        version = await held.session.extend(chunks)
        if given.flush:
            flushed = {"flushed": await held.session.flush()}
    except PipelineClosedError as error:
        raise _ended(service, error) from None
    except SessionLogError:
        if held.is_closed:
            raise _ended(service, PipelineClosedError("the session was closed")) from None
        if (kept := held.session.state.log) is None or kept.error is None:
            raise
        what = f"version {version} is in the session, and not on the disk: {kept.error}"
        raise RequestError(what, status=503, code="session_log_failed") from None
    return {"version": version, "num_dropped": held.session.state.num_dropped, **flushed}


async def frozen(service: Service, held: Held, given: Frozen) -> dict[str, Any]:
    """Have another system text, and say from which version on.

    :raises RequestError: the session was closed.
    :raises PromptTooLongError: it leaves no room for a question.
    :raises PipelineClosedError: the service is stopping.
    """
    try:
        return {"version": await held.session.freeze(given.system)}
    except PipelineClosedError as error:
        raise _ended(service, error) from None


async def answering(service: Service, caller: Caller, held: Held, asked: Question) -> AsyncGenerator[Event, None]:
    """What happens while a question is answered.

    :raises RefusedError: there is no place for it.
    :raises RequestError: the session was closed.
    :raises StreamRagError: as `Session.ask_events` does.
    """
    params = service.answering(
        sampling(service.params, max_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed)
    )
    given = asked.model_dump(include={"answers", "at_least", "with_gap", "decisive_gap"})
    stream = held.session.ask_events(asked.question, params=params, deadline_s=service.limits.deadline_s, **given)
    num_tokens = len(asked.question)  # at most: the data before it are computed
    with held.in_use():
        async with (
            service.open(
                caller, "sessions", asked.question, max_tokens=params.max_tokens, num_prompt_tokens=num_tokens
            ) as opened,
            stream as seen,
        ):
            try:
                async for event in opened.noted(seen):
                    yield event
            except PipelineClosedError as error:
                raise _ended(service, error) from None


def _ended(service: Service, error: PipelineClosedError) -> StreamRagError:
    """With the service the session may be there again after a restart; else it is gone."""
    return error if service.admission.is_draining else gone("the session was closed")


def state_of(held: Held) -> dict[str, Any]:
    """How it stands, for its client."""
    watches = {name: watch.question[:MAX_SHOWN] for name, (watch, _) in sorted(held.watches.items())}
    return {"id": held.id, **asdict(held.session.state), "watches": watches}


async def newest(held: Held, behind: str) -> dict[str, Any]:
    """Data in the window behind this version, the newest of them, with their versions; those of before are gone.

    :raises RequestError: it is none.
    """
    data = await held.session.newest(behind=event_id(behind, "behind"), at_most=MAX_DATA)
    return {"data": [{"version": version, "text": text} for version, text in data]}


def event_id(given: str, param: str) -> int:
    """The id of the last event that a client has seen, or a version.

    :raises RequestError: it is none.
    """
    if not (given.isdecimal() and len(given) < 19):
        raise RequestError(f"{param} must be a whole number", param=param)
    return int(given)
