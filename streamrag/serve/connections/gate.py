"""The gate that checks each request before it is parsed: host, origin, key and length. Sets the request's id."""

import asyncio
import base64
import binascii
import hashlib
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrag.serve.connections.bounded_body import BoundedBody
from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.failures import ANONYMOUS, RequestError, failure_of
from streamrag.serve.limits import Limits
from streamrag.serve.open_queries import Caller

CALLER = "streamrag.caller"  # key of the `Caller` in a request's scope

ERROR = "streamrag.error"  # key of the error in the scope of a request that is answered with one

OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/readyz"})
"""Paths that need no key, for load balancers and for browsers without one. Paths below /page/ need none either."""

SUBPROTOCOL = "streamrag"
"""Subprotocol of WebSockets. Browsers cannot set headers, so they offer a second subprotocol: `KEY_PREFIX` and the key
as base64url."""

KEY_PREFIX = "streamrag-key."

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

REQUEST_S = 0.000_5
"""CPU seconds that each request is charged. To append a line to a session takes 0.8 ms, its parsing included."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)

_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, PUT, DELETE",
    "access-control-allow-headers": "authorization, content-type, x-request-id, traceparent, tracestate, last-event-id",
    "access-control-max-age": "600",
}


OnFailure: TypeAlias = Callable[[Scope, int], None]


class Gate:
    """ASGI middleware that admits or refuses requests.

    keys: client names by key. Without keys, every client is "anonymous".
    hosts: permitted names in the Host header; None permits any. Prevents DNS rebinding: a foreign page that resolves
        its own name to 127.0.0.1.
    origins: origins whose pages may send requests, besides the service's own; "*" permits any.
    share: shares the event loop among clients.
    on_failure: is called with the scope and the status of each response of 400 or more.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        keys: Mapping[str, str] | None = None,
        hosts: frozenset[str] | None = LOOPBACK,
        origins: frozenset[str] = frozenset(),
        share: FairShare | None = None,
        on_failure: OnFailure = lambda scope, status: None,
    ) -> None:
        self.on_failure = on_failure
        self._app = app
        self._limits = limits
        self._share = share or FairShare()
        self.set_keys(keys or {})
        self._hosts = hosts
        self._origins = origins
        self._num_open: Counter[str] = Counter()

    @property
    def has_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._keys)

    def set_keys(self, keys: Mapping[str, str]) -> None:
        """Replace the valid keys. Open requests continue; a WebSocket is checked again at its next frame."""
        # Digests: a lookup costs the same for any number of keys, and leaks no timing about near misses.
        self._keys = {_digest(key.encode()): client for key, client in keys.items()}
        turns = FairShare(self._share.now_s)
        self._accounts = defaultdict[str, Account](lambda: Account(self._share))
        self._turns = defaultdict[str, Account](lambda: Account(turns))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application with its `CALLER`, or answer it with an error; count open requests."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        cors = self._cors(headers.get("origin"))
        body = BoundedBody(scope["path"], headers, receive, self._limits)
        send = self._with_headers(send, scope, {"x-request-id": request_id, **cors}, body)
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and cors:
                await JSONResponse({}, headers=_PREFLIGHT)(scope, receive, send)
                return
            caller = scope[CALLER] = self._caller(scope, headers, request_id)
            body.check_length()
            self._check_open(caller.client)
        except RequestError as error:
            scope.update({"app": self._app, CALLER: scope.get(CALLER, Caller(request_id, ANONYMOUS)), ERROR: error})
            await _refuse(error, scope, receive, send)
            return
        with self._count_open(caller.client):
            if scope["path"] not in OPEN_PATHS:  # health checks never wait
                await asyncio.sleep(caller.turns.turn_s(REQUEST_S))
            if scope["type"] == "http":
                await self._run_request(scope, body.receive, send)
            else:
                await self._run_socket(scope, receive, send, caller)

    def _with_headers(self, send: Send, scope: Scope, headers: Mapping[str, str], body: BoundedBody) -> Send:
        """Return `send` with these headers in responses, and with calls of `on_failure`."""
        is_accepted = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_accepted
            if message["type"] in ("http.response.start", "websocket.accept"):
                more = MutableHeaders(scope=message)
                more.update(headers)
                if message["type"] == "http.response.start" and not body.is_read:
                    more["connection"] = "close"
            is_accepted |= message["type"] == "websocket.accept"
            status = message.get("status", 403 if message["type"] == "websocket.close" and not is_accepted else 200)
            # Not for health checks, nor if the client has left.
            if status >= 400 and status != 499 and (ERROR in scope or scope["path"] not in OPEN_PATHS):
                self.on_failure(scope, status)
            await send(message)

        return send_with_headers

    async def _run_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an HTTP request. Starlette raises again what it has answered with 500: that error ends here."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if error is not scope.get(ERROR):
                raise
        finally:
            scope.pop(ERROR, None)  # uvicorn keeps the scope while the connection is idle

    @contextmanager
    def _count_open(self, client: str) -> Iterator[None]:
        """Count a request as one of the client's open ones while the block runs."""
        self._num_open[client] += 1
        try:
            yield
        finally:
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]

    async def _run_socket(self, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        """Run a WebSocket whose application sees a frame that comes after the key was revoked as a disconnect; then
        close the socket (1008)."""
        has_key = True

        async def receive_with_key() -> Message:
            nonlocal has_key
            message = await receive()
            has_key = caller.has_key()
            return message if has_key else {"type": "websocket.disconnect", "code": 1008}

        await self._app(scope, receive_with_key, send)
        if not has_key:
            await send({"type": "websocket.close", "code": 1008, "reason": "this API key is no longer valid"})

    def _caller(self, scope: Scope, headers: Headers, request_id: str) -> Caller:
        """Return the caller, `ANONYMOUS` where no key is needed.

        The caller's `has_key` checks the key anew, against the keys of that time.

        :raises RequestError: a key is needed, and is missing or invalid (401).
        """
        if (client := self._client(scope)) is None:
            message = "an API key is required: send `Authorization: Bearer KEY`"
            raise RequestError(message, status=401, code="invalid_api_key")
        return Caller(
            request_id,
            client,
            headers.get("traceparent"),
            headers.get("tracestate"),
            lambda: self._client(scope) == client,
            self._accounts[client],
            self._turns[client],
        )

    def _client(self, scope: Scope) -> str | None:
        """Return the client's name, or None if a key is required and the request has no valid one."""
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith("/page/"):
            return ANONYMOUS
        return self._keys.get(_digest(key)) if (key := _key(scope)) else None

    def _check_open(self, client: str) -> None:
        """Raise RequestError (429) if the client, unless anonymous, has too many open requests."""
        most = self._limits.max_connections_per_client
        if client != ANONYMOUS and self._num_open[client] >= most:
            message = f"{most:,} requests of yours are open, which is the most"
            raise RequestError(message, status=429, code="too_many_connections")

    def _check_host(self, headers: Headers) -> None:
        """Raise RequestError (421) unless the Host header has a permitted name."""
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if self._hosts is not None and host not in self._hosts:
            message = f"host {host[:80]!r} is not one of this service's names: add it to its configured hosts"
            raise RequestError(message, status=421, code="wrong_host")

    def _check_origin(self, headers: Headers) -> None:
        """Raise RequestError (403) unless the origin is listed, the service's own, or absent."""
        origin = headers.get("origin")
        if origin is None or self._is_listed(origin) or _split(origin).netloc == headers.get("host"):
            return
        message = f"pages of {origin[:80]!r} may not use this service: add it to its configured origins"
        raise RequestError(message, status=403, code="wrong_origin")

    def _is_listed(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _cors(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let a page of a listed origin read the response; none for others."""
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, retry-after",
            "vary": "origin",
        }


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key(scope: Scope) -> bytes:
    """Return the key of a Bearer header, or else of a WebSocket's subprotocols; empty if none is well-formed."""
    scheme, _, credentials = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode()
    for offer in scope.get("subprotocols", ()):
        if offer.startswith(KEY_PREFIX):
            code = offer.removeprefix(KEY_PREFIX)
            try:
                return base64.b64decode(code + "=" * (-len(code) % 4), "-_", validate=True)
            except (binascii.Error, ValueError):  # ValueError: non-ASCII letters
                return b""
    return b""


def _split(url: str) -> SplitResult:
    """Return the parts of a URL, empty ones if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:  # invalid IPv6 brackets
        return urlsplit("")


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the error, or close a WebSocket before its handshake, with the beginning of the message."""
    failure = failure_of(error)
    if scope["type"] == "http":
        await JSONResponse(failure.body(), failure.status)(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": failure.message[:120]})
