"""The gate that every request passes before it is read: host, origin, key, length, and an id of its own."""

import asyncio
import base64
import binascii
import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.failures import ANONYMOUS, RequestError, failure_of
from streamrag.serve.limits import Limits
from streamrag.serve.open_queries import Caller

CALLER = "streamrag.caller"
"""Key of the `Caller` in a request's scope."""

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
"""Paths that need no key: for load balancers, and for a browser that has none yet. Nor does anything below /page/."""

SUBPROTOCOL = "streamrag"
"""Subprotocol of WebSockets. A browser can set no headers: it offers its key beside this one, base64url behind
`KEY_PREFIX`."""

KEY_PREFIX = "streamrag-key."

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """ASGI middleware that lets requests in, or refuses them.

    keys: names of clients, by key. Without any, everybody is "anonymous".
    hosts: names that the service may be asked by, in the Host header; None for any. It keeps out a foreign page that
        makes its own name resolve to 127.0.0.1.
    origins: origins whose pages may ask, besides the service's own; "*" is any.
    share: of the event loop, for what clients cause.
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
    ) -> None:
        self._app = app
        self._limits = limits
        self.set_keys(keys or {})
        self._hosts = hosts
        self._origins = origins
        self._share = share or FairShare()
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._open: Counter[str] = Counter()

    @property
    def has_keys(self) -> bool:
        """Whether clients must have a key."""
        return bool(self._keys)

    def set_keys(self, keys: Mapping[str, str]) -> None:
        """Accept these keys alone from now on. Open requests go on, and a WebSocket until its next frame."""
        # By digest: one among thousands costs as much as one, and no time tells how near a guess was.
        self._keys = {_digest(key.encode()): client for key, client in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        cors = self._cors(headers.get("origin"))
        body = _Body(scope["path"], headers, receive, self._limits)

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                more = MutableHeaders(scope=message)
                more.update({"x-request-id": request_id, **cors})
                if message["type"] == "http.response.start" and not body.is_read:
                    more["connection"] = "close"
            await send(message)

        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and cors:
                await JSONResponse({}, headers=_PREFLIGHT)(scope, receive, send_with_id)
                return
            caller = scope[CALLER] = self._caller(scope, headers, request_id)
            body.check_length()
            self._check_open(caller.client)
        except RequestError as error:
            await _refuse(error, scope, receive, send_with_id)
            return
        with self._counted(caller.client):
            if scope["type"] == "http":
                await self._app(scope, body.receive, send_with_id)
            else:
                await self._connect(scope, receive, send_with_id, caller)

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        """Count an open request of a client."""
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    async def _connect(self, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        """Run a WebSocket for as long as its client has a key."""
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
        if (client := self._client(scope)) is None:
            raise RequestError(
                "this service wants an API key: send `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
            )
        return Caller(
            request_id,
            client,
            headers.get("traceparent"),
            headers.get("tracestate"),
            lambda: self._client(scope) == client,
            self._accounts.setdefault(client, Account(self._share)),
        )

    def _client(self, scope: Scope) -> str | None:
        """Return the name of the client whose key a request has; None if it should have one."""
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith("/page/"):
            return ANONYMOUS
        return self._keys.get(_digest(key)) if (key := _key(scope)) else None

    def _check_open(self, client: str) -> None:
        most = self._limits.max_connections_per_client
        if client != ANONYMOUS and self._open[client] >= most:
            raise RequestError(
                f"{most:,} requests of yours are open, which is the most", status=429, code="too_many_connections"
            )

    def _check_host(self, headers: Headers) -> None:
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if self._hosts is not None and host not in self._hosts:
            raise RequestError(
                f"this service is not asked by the name {host[:80]!r}: configure it as one of its hosts",
                status=421,
                code="wrong_host",
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or self._is_listed(origin) or _split(origin).netloc == headers.get("host"):
            return
        raise RequestError(
            f"pages of {origin[:80]!r} may not ask this service: configure it as one of its origins",
            status=403,
            code="wrong_origin",
        )

    def _is_listed(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _cors(self, origin: str | None) -> dict[str, str]:
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, retry-after",
            "vary": "origin",
        }


class _Body:
    """A request's body, bounded in length and in time; that of a stream may take as long as it needs."""

    def __init__(self, path: str, headers: Headers, receive: Receive, limits: Limits) -> None:
        is_stream = path == "/v1/streams"
        self._headers = headers
        self._receive = receive
        self._most = limits.max_stream_bytes if is_stream else limits.max_body_bytes
        self._most_s = None if is_stream else limits.body_s
        self._end_s: float | None = None
        self._num_bytes = 0
        self.is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        """Whether nothing more will come. An answer before that is the connection's last."""

    def check_length(self) -> None:
        """Check the length that the headers announce.

        :raises RequestError: it is too long.
        """
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._most:
            raise self._too_long()

    async def receive(self) -> Message:
        """Return the next message.

        :raises RequestError: it is too long, or too late.
        """
        if self.is_read or self._most_s is None:
            message = await self._receive()
        else:
            now = asyncio.get_running_loop().time
            self._end_s = now() + self._most_s if self._end_s is None else self._end_s
            try:
                async with asyncio.timeout_at(self._end_s):
                    message = await self._receive()
            except TimeoutError:
                raise RequestError(
                    f"the body has not come within {self._most_s:g} s", status=408, code="body_too_slow"
                ) from None
        self.is_read = self.is_read or not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._most:
            raise self._too_long()
        return message

    def _too_long(self) -> RequestError:
        return RequestError(
            f"the body has more than {self._most:,} bytes, which is the most", status=413, code="body_too_long"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key(scope: Scope) -> bytes:
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    for offered in scope.get("subprotocols", ()):
        if offered.startswith(KEY_PREFIX):
            coded = offered[len(KEY_PREFIX) :]
            try:
                return base64.b64decode(coded + "=" * (-len(coded) % 4), "-_", validate=True)
            except (binascii.Error, ValueError):  # the latter: of letters that are not ASCII
                return b""
    return b""


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # of brackets that hold no address
        return urlsplit("")


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, PUT, DELETE",
    "access-control-allow-headers": "authorization, content-type, x-request-id, traceparent, tracestate, last-event-id",
    "access-control-max-age": "600",
}


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    failure = failure_of(error)
    if scope["type"] == "http":
        await JSONResponse(failure.body(), failure.status)(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": failure.message[:120]})
