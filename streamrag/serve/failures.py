"""Errors as clients see them, in OpenAI's form."""

import json
from dataclasses import dataclass
from typing import Any

from streamrag.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineDeadError,
    PipelineClosedError,
    PromptTooLongError,
    SourceError,
    StreamRagError,
    TooManyQueriesError,
)
from streamrag.serve.observe.observer import QueryOutcome, Refusal

ANONYMOUS = "anonymous"


class RequestError(StreamRagError):
    """A request that is refused. `param` is the invalid field, and `line` the number of the line in a body of lines."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.line = line


class NotAdmittedError(TooManyQueriesError):
    """A query that was not admitted, because the service is full or not ready. It may be retried after a while."""

    def __init__(self, message: str, why: Refusal, retry_after_s: float) -> None:
        super().__init__(message)
        self.why: Refusal = why
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Failure:
    """The public part of an error, without internals."""

    status: int
    type: str
    code: str
    message: str
    outcome: QueryOutcome
    param: str | None = None
    retry_after_s: float | None = None
    line: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error if self.line is None else {**error, "line": self.line}}

    def json(self) -> str:
        """Return `body` as JSON text."""
        return json.dumps(self.body())

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the error."""
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


RETRIEVAL_FAILED = "retrieval failed; see the service's log"
ENGINE_DIED = "the engine died; try again once it is running"
ENGINE_FAILED = "the engine failed; see the service's log"
INTERNAL_ERROR = "internal error; see the service's log"


def failure_of(error: BaseException) -> Failure:
    """Return the public part of an error: its HTTP status, code, message and outcome, 500 for an unexpected error.

    Messages of unexpected errors, of sources and of engines may name internal hosts, addresses and files. They are
    replaced here; nothing is logged here.
    """
    message = str(error)
    match error:
        case RequestError():
            kind = "authentication_error" if error.status == 401 else "invalid_request_error"
            return Failure(error.status, kind, error.code, message, "invalid", error.param, line=error.line)
        case NotAdmittedError(why="draining" | "not_ready"):
            return _unavailable(error.why, message, error.retry_after_s)
        case NotAdmittedError():
            return Failure(429, "rate_limit_error", error.why, message, "invalid", retry_after_s=error.retry_after_s)
        case TooManyQueriesError():
            return Failure(429, "rate_limit_error", "queries", message, "invalid", retry_after_s=1.0)
        case DeadlineExceededError():
            return Failure(504, "timeout_error", "deadline_exceeded", message, "deadline")
        case PromptTooLongError():
            return Failure(400, "invalid_request_error", "context_length_exceeded", message, "too_long")
        case EngineDeadError():
            return Failure(503, "server_error", "engine_dead", ENGINE_DIED, "engine_dead", retry_after_s=30.0)
        case SourceError():
            return Failure(502, "server_error", "retrieval_failed", RETRIEVAL_FAILED, "source_error")
        case PipelineClosedError():
            return _unavailable("draining", "the service is stopping", 5.0)
        case ConfigurationError():
            return Failure(400, "invalid_request_error", "invalid_value", message, "invalid")
        case StreamRagError():
            return Failure(502, "server_error", "backend_failed", ENGINE_FAILED, "backend_error")
    return Failure(500, "server_error", "internal_error", INTERNAL_ERROR, "internal_error")


def _unavailable(code: str, message: str, retry_after_s: float) -> Failure:
    """Return a failure with status 503, which counts as "shut_down"."""
    return Failure(503, "service_unavailable", code, message, "shut_down", retry_after_s=retry_after_s)
