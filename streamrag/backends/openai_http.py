"""Requests to an OpenAI-compatible server: retries, timeouts, and every way to fail as a `ServerError`."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import anyio
import httpx
from httpx_sse import EventSource, SSEError

from streamrag.errors import ServerError

__all__ = ["RefusedError", "Server"]

MAX_MESSAGE_CHARS = 500
MAX_ERROR_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 10.0


class RefusedError(ServerError):
    """The server understands that it does not want this request: status 400, 404 or 422."""


class Server:
    """Connections to one server. Making it loads certificates: not for the event loop.

    `timeout_s` is the longest silence. Connections that fail before the first byte are tried again `max_retries` times.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, max_retries: int, retry_delay_s: float
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._retry_delay_s = retry_delay_s
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=None),  # how many queries run at once is the pipeline's to say
            trust_env=False,
        )

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with."""
        async with self._response(method, path, body) as response:
            await response.aread()
            return _object(response.text)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of the events that the server answers with, up to `[DONE]` or its end."""
        async with (
            self._response("POST", path, body) as response,
            aclosing(EventSource(response).aiter_sse()) as events,
        ):
            async for event in events:
                if event.data == "[DONE]":
                    return
                value = _object(event.data)
                if "error" in value:
                    raise ServerError(f"{self.url} failed while it answered: {_message(event.data)}")
                yield value

    @asynccontextmanager
    async def _response(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """A response of status 200 whose body is still to be read. Errors while it is read are translated as well."""
        with self._errors_translated():
            response = await self._send(method, path, body)
            try:
                if response.status_code != 200:
                    error = RefusedError if response.status_code in (400, 404, 422) else ServerError
                    message = _message(await _beginning(response))
                    raise error(f"{self.url}{path} answered with status {response.status_code}: {message}")
                yield response
            finally:
                await response.aclose()

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        request = self._client.build_request(method, self.url + path, json=body)
        for attempt in range(self._max_retries):
            try:
                return await self._client.send(request, stream=True)
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout):
                if self._client.is_closed:
                    raise
            await anyio.sleep(self._retry_delay_s * 2**attempt)
        return await self._client.send(request, stream=True)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            why = str(error) or "no answer"
            raise ServerError(f"{self.url} cannot be reached: {why}. Is the server running?") from error
        except SSEError as error:
            raise ServerError(f"{self.url} did not answer with a stream of events: {error}") from error
        except httpx.TimeoutException as error:
            raise ServerError(f"{self.url} has sent nothing for {self._timeout_s:g} s (timeout_s)") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} broke off: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:  # of httpx, for a closed client
            if not self._client.is_closed:
                raise
            raise ServerError(f"the backend was closed while it asked {self.url}") from error
        except _NotAnObjectError as error:
            raise ServerError(f"{self.url} sent what is no JSON object: {error}") from None


class _NotAnObjectError(Exception):
    """The text that is not the JSON object it should be, shortened."""


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _NotAnObjectError(repr(text[:MAX_MESSAGE_CHARS]))
    return value


async def _beginning(response: httpx.Response) -> str:
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_ERROR_BYTES:
            break
    return body.decode(errors="replace")


def _message(text: str) -> str:
    """What a server says in one of the common forms of an error, or the text itself."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    return str(message or text)[:MAX_MESSAGE_CHARS].strip() or "no reason given"
