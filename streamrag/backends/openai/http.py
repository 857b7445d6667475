"""Requests to an OpenAI-compatible server: retries, limits, and translation of all errors to `ServerError`.

A server is not trusted. Each phase of a response is limited in size and time. Responses are not decompressed or decoded
by a codec that the server names; cookies are not stored and redirects not followed.
"""

import asyncio
import codecs
import io
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import anyio
import httpx

from streamrag.backends.openai.bytes import Bounds, CountingTransport, TooMuchError, bound_body
from streamrag.backends.openai.messages import MAX_ERROR_BYTES, clean, is_error, server_words
from streamrag.errors import ConfigurationError, ServerError
from streamrag.support.bounded_reading import parse_json
from streamrag.support.counted_stream import ResponseTooLargeError

NO_STREAM = "did not answer with a stream of events"
MAX_ANSWER_BYTES = 1 << 22
"""Most bytes of a JSON response: enough for a list of a thousand models, or a prompt of 500,000 token ids."""
MAX_VALUES = 1 << 19
"""Most values in a JSON text: each takes up to 70 bytes of memory, and parsing blocks the event loop."""
MAX_EVENT_LINES = 8
"""Most lines of a stream per event: two, or four with two-character line ends, and as many for comments."""
CONNECT_TIMEOUT_S = 10.0


class RequestRejectedError(ServerError):
    """The server refuses this request: status 400, 404, 405, 422 or 501, or an error in place of the answer."""


class StrayTextError(ServerError):
    """The stream has ended, and had something else than chunks of an answer, which may be why the answer is missing."""


REFUSALS = (400, 404, 405, 422, 501)


class Server:
    """Connections to one server. Construct it in a thread: it loads certificates. No message shows the query in `url`.

    `timeout_s` limits silence, and the time for any single item: the headers of a response, its JSON, an event of a
    stream. Connections that fail before the first byte are retried `max_retries` times.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, max_retries: int, retry_delay_s: float
    ) -> None:
        self.url, mark, query = url.partition("?")
        self._query = mark + query
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
        """Send `body` and return the JSON object of the response, of at most `max_bytes`; a list is returned as `data`.

        `path` may be a whole URL. Only connections that fail before the response are retried. Raises ServerError for
        all else, also a status other than 200, and ConfigurationError if `body` cannot be written as JSON.
        """
        async with self._response(method, path, body, Bounds(max_bytes)) as response:
            async with asyncio.timeout(self._timeout_s):
                await response.aread()
            value = _object(response.text, may_be_list=True)
            if is_error(value):
                raise RequestRejectedError(f"{self._address(path)} failed: {server_words(response.text)}")
            return value

    async def stream(
        self, path: str, body: Mapping[str, Any], *, max_bytes: int, max_events: int, max_event_bytes: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Post `body` and yield the JSON object of each event up to `[DONE]` or the end of the response.

        Raises ServerError for an event with an error, for one that is no object, and at a limit; at the end
        StrayTextError, if there was anything but events with choices.
        """
        bounds = Bounds(max_bytes, max_lines=MAX_EVENT_LINES * max_events, max_line_bytes=max_event_bytes)
        async with self._response("POST", path, body, bounds) as response:
            other, value, stray = "", dict[str, Any](), list[str]()
            async with aclosing(event_data(response.aiter_bytes(), stray)) as events:
                for _ in range(max_events):
                    async with asyncio.timeout(self._timeout_s):
                        data = await anext(events, "[DONE]")
                    if data == "[DONE]":
                        break
                    if len(data) > max_event_bytes:
                        raise TooMuchError(f"{max_event_bytes:,} bytes in one event")
                    value = _object(data)
                    if is_error(value):
                        raise ServerError(f"{self.url} failed during an answer: {server_words(data)}")
                    other = other if "choices" in value else data
                    yield value
                else:
                    raise TooMuchError(f"{max_events:,} events")
            if text := server_words("\n".join(stray) or other):
                what = "ended the stream in the middle of an answer" if value else NO_STREAM
                raise StrayTextError(f"{self.url} {what}: {text}")

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, bounds: Bounds
    ) -> AsyncIterator[httpx.Response]:
        """Open a response of status 200 with a bounded, unread body, and close it. Errors inside are translated too.

        Raises RequestRejectedError for a status in `REFUSALS`, ServerError for others, a page or an encoded body.
        """
        with self._errors_translated():
            response = await self._send(method, path, body)
            try:
                coding = response.headers.get("content-encoding", "identity")
                if coding != "identity":
                    raise ServerError(f"{self.url} sent a response in the unsupported encoding {clean(coding)}")
                is_page = "html" in response.headers.get("content-type", "").lower()
                is_answer = response.status_code == 200 and not is_page
                bound_body(response, bounds if is_answer else Bounds(bounds.max_bytes))
                response.encoding = "utf-8-sig"  # ignore the server's: some Python codecs decompress
                if not is_answer:
                    error = RequestRejectedError if response.status_code in REFUSALS else ServerError
                    async with asyncio.timeout(self._timeout_s):
                        message = server_words(await _beginning(response)) or "no reason given"
                    is_elsewhere = response.status_code in (200, 404) and not self.url.endswith("/v1")
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
            request = self._client.build_request(method, self._address(path) + self._query, json=body)
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


def _object(text: str, *, may_be_list: bool = False) -> dict[str, Any]:
    """Return the JSON object in `text`; raise _NotAnObjectError for anything else, or for too many values."""
    try:
        value = parse_json(text, is_strict=False) if sum(map(text.count, ",[{")) <= MAX_VALUES else None
    except ValueError:
        value = None
    if may_be_list and isinstance(value, list):
        return {"data": value}
    if not isinstance(value, dict):
        raise _NotAnObjectError(repr(server_words(text)))
    return value


async def _beginning(response: httpx.Response) -> str:
    """Return the first `MAX_ERROR_BYTES` of the body as text, and read hardly more."""
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES].decode(errors="replace")


OTHER_FIELDS = ("event", "id", "retry", "")  # of no use to us; a comment's name is empty
MAX_STRAY_LINES = 100


async def event_data(body: AsyncIterator[bytes], stray: list[str]) -> AsyncGenerator[str, None]:
    """Yield the data of each event that has some, but null, without spaces around it, of a stream of server-sent events
    as in https://html.spec.whatwg.org/multipage/server-sent-events.html.

    The last event needs no empty line behind it if it ends as an object does. The first lines that belong to no event,
    usually an error in another format, are appended to `stray`.
    """
    fields: list[str] = []
    async with aclosing(_lines(body)) as lines:
        async for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                fields.append(value.removeprefix(" "))
            elif not line:
                if (data := "\n".join(fields).strip()) not in ("", "null"):
                    yield data
                fields.clear()
            elif name not in OTHER_FIELDS and len(stray) < MAX_STRAY_LINES:
                stray.append(line)
    if (data := "\n".join(fields).strip()).endswith("}"):
        yield data


async def _lines(body: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield the lines of a body in UTF-8, which end with LF, CR or CRLF, and with no other character of Unicode's."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    unfinished: list[str] = []
    async for piece in body:
        first, *others = decoder.decode(piece).split("\n")
        unfinished.append(first)
        for line in others:
            yield "".join(unfinished)
            unfinished = [line]
    for line in ("".join(unfinished) + decoder.decode(b"", final=True)).split("\n"):
        yield line
