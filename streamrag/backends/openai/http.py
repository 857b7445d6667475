"""Requests to an OpenAI-compatible server: retries, limits, and translation of all errors to `ServerError`.

A server is not trusted. Each phase of a response is limited in size and time. Responses are not decompressed or decoded
by a codec that the server names; cookies are not stored and redirects not followed.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import anyio
import httpx
from httpx_sse import EventSource, SSEError

from streamrag.backends.openai.bytes import Bounds, CountingTransport, TooMuchError, bound_body
from streamrag.errors import ConfigurationError, ServerError
from streamrag.support.bounded_reading import parse_json
from streamrag.support.counted_stream import ResponseTooLargeError

MAX_MESSAGE_CHARS = 500
MAX_ERROR_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 22
"""Most bytes of a JSON response: enough for a list of a thousand models, or a prompt of 500,000 token ids."""
MAX_VALUES = 1 << 19
"""Most values in a JSON text: each takes up to 70 bytes of memory, and parsing blocks the event loop."""
MAX_EVENT_LINES = 8
"""Most lines of a stream per event: two, or four with two-character line ends, and as many for comments."""
CONNECT_TIMEOUT_S = 10.0


class RequestRejectedError(ServerError):
    """The server refuses this request: status 400, 404, 405, 422 or 501."""


REFUSALS = (400, 404, 405, 422, 501)


class Server:
    """Connections to one server. Construct it in a thread: it loads certificates.

    `timeout_s` limits silence, and the time for any single item: the headers of a response, its JSON, an event of a
    stream. Connections that fail before the first byte are retried `max_retries` times.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, max_retries: int, retry_delay_s: float
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._retry_delay_s = retry_delay_s
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            transport=CountingTransport(),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            trust_env=False,
        )

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, max_bytes: int = MAX_ANSWER_BYTES
    ) -> dict[str, Any]:
        """Send `body` and return the JSON object of the response, of at most `max_bytes`. `path` may be a whole URL.

        Only connections that fail before the response are retried. Raises ServerError for all else, also a status other
        than 200, and ConfigurationError if `body` cannot be written as JSON.
        """
        async with self._response(method, path, body, Bounds(max_bytes)) as response:
            async with asyncio.timeout(self._timeout_s):
                await response.aread()
            return _object(response.text)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, max_bytes: int, max_events: int, max_event_bytes: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Post `body` and yield the JSON object of each event up to `[DONE]` or the end of the response.

        Raises ServerError for an event with `error`, for one that is no object, and at a limit.
        """
        bounds = Bounds(max_bytes, max_lines=MAX_EVENT_LINES * max_events, max_line_bytes=max_event_bytes)
        async with (
            self._response("POST", path, body, bounds) as response,
            aclosing(EventSource(response).aiter_sse()) as events,
        ):
            for _ in range(max_events):
                async with asyncio.timeout(self._timeout_s):
                    event = await anext(events, None)
                if event is None or event.data == "[DONE]":
                    return
                if len(event.data) > max_event_bytes:
                    raise TooMuchError(f"{max_event_bytes:,} bytes in one event")
                value = _object(event.data)
                if "error" in value:
                    raise ServerError(f"{self.url} failed during an answer: {_message(event.data)}")
                yield value
            raise TooMuchError(f"{max_events:,} events")

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, bounds: Bounds
    ) -> AsyncIterator[httpx.Response]:
        """Open a response of status 200 with a bounded, unread body, and close it. Errors inside are translated too.

        Raises RequestRejectedError for a status in `REFUSALS`, ServerError for others or an encoded body.
        """
        with self._errors_translated():
            response = await self._send(method, path, body)
            try:
                coding = response.headers.get("content-encoding", "identity")
                if coding != "identity":
                    raise ServerError(f"{self.url} sent a response in the unsupported encoding {clean(coding)}")
                bound_body(response, bounds if response.status_code == 200 else Bounds(bounds.max_bytes))
                response.encoding = "utf-8"  # ignore the server's: some Python codecs decompress
                if response.status_code != 200:
                    error = RequestRejectedError if response.status_code in REFUSALS else ServerError
                    async with asyncio.timeout(self._timeout_s):
                        message = _message(await _beginning(response))
                    is_elsewhere = response.status_code == 404 and not self.url.endswith("/v1")
                    hint = ". Most servers have addresses that end in /v1" if is_elsewhere else ""
                    raise error(f"{self._address(path)} answered with status {response.status_code}: {message}{hint}")
                yield response
            finally:
                await response.aclose()

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """Return the response, unread, of any status. A connection that fails before is retried, after growing delays.

        Raises httpx's error or TimeoutError, and ConfigurationError if `body` cannot be written as JSON.
        """
        try:
            request = self._client.build_request(method, self._address(path), json=body)
        except (TypeError, ValueError) as error:  # from `SamplingParams.extra`
            raise ConfigurationError(f"the request cannot be written as JSON: {error}") from error
        for attempt in range(self._max_retries):
            try:
                return await self._send_once(request)
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout):
                if self._client.is_closed:
                    raise
            await anyio.sleep(self._retry_delay_s * 2**attempt)
        return await self._send_once(request)

    def _address(self, path: str) -> str:
        return path if "://" in path else self.url + path

    async def _send_once(self, request: httpx.Request) -> httpx.Response:
        async with asyncio.timeout(CONNECT_TIMEOUT_S + self._timeout_s):  # headers may arrive byte by byte
            return await self._client.send(request, stream=True)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Turn errors of the connection, limits, timeouts and JSON, or of a closed client, into ServerError."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            why = clean(str(error)) or "no answer"
            raise ServerError(f"{self.url} cannot be reached: {why}. Is the server running?") from error
        except SSEError as error:
            raise ServerError(f"{self.url} did not answer with a stream of events: {clean(str(error))}") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ServerError(f"{self.url} has sent nothing, or nothing complete, for {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} disconnected: {clean(str(error)) or type(error).__name__}") from error
        except RuntimeError as error:  # httpx's, for a closed client
            if not self._client.is_closed:
                raise
            raise ServerError(f"the backend was closed during a request to {self.url}") from error
        except _NotAnObjectError as error:
            raise ServerError(f"{self.url} did not send a JSON object: {error}") from None
        except TooMuchError as error:
            raise ServerError(f"{self.url} sent more than the limit of {error} for this response") from None
        except ResponseTooLargeError as error:
            raise ServerError(f"{self.url} sends too much: {error}") from None


class _NotAnObjectError(Exception):
    """The text, shortened, that is not a JSON object."""


def clean(text: str) -> str:
    """Return untrusted text short, on one line, and without control or direction characters."""
    text = "".join(character if character.isprintable() else " " for character in text[:MAX_MESSAGE_CHARS])
    return text.strip()


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`; raise _NotAnObjectError for anything else, or for too many values."""
    try:
        value = parse_json(text) if sum(map(text.count, ",[{")) <= MAX_VALUES else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _NotAnObjectError(repr(text[:MAX_MESSAGE_CHARS]))
    return value


async def _beginning(response: httpx.Response) -> str:
    """Return the first `MAX_ERROR_BYTES` of the body as text, and read hardly more."""
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES].decode(errors="replace")


def _message(text: str) -> str:
    """Return the clean message in the JSON of an error, or else the text; "no reason given" if that is empty."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = None
    return clean(message if isinstance(message, str) and message else text) or "no reason given"
