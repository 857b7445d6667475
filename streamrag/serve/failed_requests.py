"""Requests, and frames of WebSockets, that got an error: reported to the observers, and logged if it is our fault."""

import logging

from starlette.routing import Match
from starlette.types import Scope

from streamrag.serve.connections.gate import CALLER, ERROR
from streamrag.serve.failures import ANONYMOUS, Failure, RequestError, failure_of
from streamrag.serve.observe.logs import FIELDS, QUERY_OF_ERROR
from streamrag.serve.observe.observer import FailedRequest, Observer

OTHER = "other"  # route of requests that have none, or whose head was not parsed

log = logging.getLogger("streamrag.serve")


class FailedRequests:
    """The requests of a service that got an error."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def note(self, scope: Scope, error: BaseException) -> Failure:
        """Report an error that a request, or a frame of a WebSocket, got, and return its public part."""
        failure = failure_of(error)
        self._report(scope, failure.status, failure, error)
        return failure

    def note_status(self, scope: Scope, status: int) -> None:
        """Report a response with this status, and with the error in the scope, if there is one."""
        if error := scope.get(ERROR):
            self.note(scope, error)
        else:
            self._report(scope, int(status))  # a library may give an `HTTPStatus`

    def _report(
        self, scope: Scope, status: int, failure: Failure | None = None, error: BaseException | None = None
    ) -> None:
        """Notify the observers. Log an unexpected error, or one of a source or an engine, with its traceback, unless
        the log of queries has logged it."""
        is_logged = hasattr(error, QUERY_OF_ERROR)
        is_ours = status in (500, 502) and not isinstance(error, RequestError)
        id, client = (scope[CALLER].id, scope[CALLER].client) if CALLER in scope else (None, ANONYMOUS)
        code, param = (None, None) if failure is None else (failure.code, failure.param)
        request = FailedRequest(id, client, _route_of(scope), status, code, param, is_logged or is_ours)
        self._observer.request_failed(request)
        if is_ours and not is_logged:
            fields = {"route": request.route, "status": status, "client": client}
            log.error("a request failed", exc_info=error, extra={"request_id": id, FIELDS: fields})


def _route_of(scope: Scope) -> str:
    """Return the path of a request's route, such as "/v1/sessions/{id}"; `OTHER` if there is none."""
    routes = getattr(scope.get("app"), "routes", ())
    found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return getattr(found, "path", OTHER)
