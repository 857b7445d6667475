"""What went wrong, as OpenAI's clients expect to be told."""

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
from streamrag.serve.observe.observer import Outcome, Refusal

ANONYMOUS = "anonymous"


class RequestError(StreamRagError):
    """A request that is refused as it stands. `status` is HTTP's, `param` the field that is wrong, `line` the number of
    its line in a body of lines."""

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


class RefusedError(TooManyQueriesError):
    """The service is full, or not there at the moment; `retry_after_s` says when to try again."""

    def __init__(self, message: str, why: Refusal, retry_after_s: float) -> None:
        super().__init__(message)
        self.why: Refusal = why
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it goes to a client."""

    status: int
    type: str
    code: str
    message: str
    outcome: Outcome
    param: str | None = None
    retry_after_s: float | None = None
    line: int | None = None

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error if self.line is None else {**error, "line": self.line}}

    def json(self) -> str:
        """`body` as text."""
        return json.dumps(self.body())

    def headers(self) -> dict[str, str]:
        """What belongs into the response's headers."""
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


RETRIEVAL_FAILED = "retrieval failed; the service's log says why"
ENGINE_DIED = "the engine died; ask again when it runs again"
ENGINE_FAILED = "the engine failed; the service's log says why"


def failure_of(error: BaseException) -> Failure:
    """How a client is told of `error`. What nobody foresaw, and what sources and engines say, which may name hosts,
    addresses and files of the inside, is for the log, and not described to strangers."""
    message = str(error)
    match error:
        case RequestError():
            kind = "authentication_error" if error.status == 401 else "invalid_request_error"
            return Failure(error.status, kind, error.code, message, "invalid", error.param, line=error.line)
        case RefusedError():
            unavailable = error.why in ("draining", "not_ready")
            return Failure(
                503 if unavailable else 429,
                "service_unavailable" if unavailable else "rate_limit_error",
                error.why,
                message,
                "shut_down" if unavailable else "invalid",
                retry_after_s=error.retry_after_s,
            )
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
            return Failure(
                503, "service_unavailable", "draining", "the service is stopping", "shut_down", retry_after_s=5.0
            )
        case ConfigurationError():
            return Failure(400, "invalid_request_error", "invalid_value", message, "invalid")
        case StreamRagError():
            return Failure(502, "server_error", "backend_failed", ENGINE_FAILED, "backend_error")
    return Failure(
        500, "server_error", "internal_error", "an error inside the service; its log says more", "internal_error"
    )
