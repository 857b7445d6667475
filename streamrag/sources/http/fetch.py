"""Fetching web pages from addresses that may be fetched, within limits, without ever blocking the event loop.

httpcore, the layer below httpx, is used directly: it lets us choose the address that a connection goes to, sends no
cookies from one page to the next, reads no environment, and hands over bodies undecoded, so that a small page that
decompresses to gigabytes is stopped in time. What it reads itself (heads, chunk sizes, trailers) is bounded by
`CountedStream`.
"""

import asyncio
import re
import ssl
import time
import zlib
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpcore

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.http.addresses import CheckedBackend, Resolve, normalize_url
from streamrag.sources.http.counted import CountedStream, ResponseTooLargeError
from streamrag.sources.http.fetched import (
    NOT_MODIFIED,
    PAGES,
    CheckRedirect,
    CostlyPageError,
    FetchLimits,
    HttpStatusError,
    Kind,
    NoConnectionError,
    OwnLimitError,
    Page,
    Remembered,
    Response,
    TooManyRedirectsError,
    Turns,
    UnusablePageError,
    Wanted,
)

PIECE_BYTES = 1 << 16
"""Bytes that are decompressed at a time."""

MAX_HEADER_FIELDS = 200

MAX_OVERHEAD_BYTES = 1 << 16
"""What a response may have beside its body: heads, trailers and the sizes of chunks. Beside a longer body, as much as
that."""

REDIRECTS = {301, 302, 303, 307, 308}
NETWORK_ERRORS = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class Fetcher:
    """The connections of one crawl.

    `ssl_context` takes milliseconds to make: share it. No socket is left open after `aclose`.
    """

    def __init__(
        self,
        limits: FetchLimits,
        *,
        user_agent: str,
        ssl_context: ssl.SSLContext,
        resolve: Resolve,
        turns: Turns | None = None,
        remembered: Remembered | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = limits
        self._turns = turns or Turns()
        self._remembered = remembered or Remembered()
        self._headers: dict[str, str] = {"User-Agent": user_agent, "Accept-Encoding": "gzip", **(more_headers or {})}
        self._num_bytes = 0
        self._backend = CheckedBackend(
            connect_timeout_s=limits.connect_timeout_s, allow_private=limits.allow_private, resolve=resolve
        )
        self._max_raw_bytes = 2 * limits.max_body_bytes + MAX_OVERHEAD_BYTES
        self._connections = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context, network_backend=self._backend, max_connections=None
        )

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def fetch(self, url: str, check_redirect: CheckRedirect, wanted: Wanted = PAGES) -> Page:
        """The page at `url`, or where it redirects to if `check_redirect` does not raise for it.

        The time in which it waits for its turn does not count.

        :raises UnreachableError: there was no answer because of the network.
        :raises UnsafeUrlError: `url` itself is at an address that is not allowed.
        :raises CostlyPageError: the answer comes too slowly.
        :raises HttpStatusError: the answer is an error.
        :raises UnusablePageError: the answer is of no use.
        """
        try:
            async with asyncio.timeout(self._limits.page_timeout_s) as timeout:
                return await self._follow(url, check_redirect, wanted, timeout)
        except TimeoutError:
            raise CostlyPageError(f"it did not end within {self._limits.page_timeout_s:g} s") from None
        except ResponseTooLargeError as error:
            raise UnusablePageError(str(error)) from None
        except httpcore.ConnectTimeout as error:
            raise NoConnectionError(f"{url} cannot be reached: {_describe(error)}") from error
        except NETWORK_ERRORS as error:
            raise UnreachableError(f"{url} cannot be reached: {_describe(error)}") from error

    async def check_address(self, url: str) -> None:
        """Resolve the host of `url`, for a browser that will fetch it.

        :raises UnreachableError: it has no address.
        :raises UnsafeUrlError: it is at an address that is not allowed.
        """
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._backend.check(parts.hostname or "", parts.port or 80)
        except httpcore.ConnectError as error:
            raise UnreachableError(f"{url} cannot be reached: {error}") from error
        except TimeoutError:
            raise NoConnectionError(f"{url} cannot be reached: resolving its name takes too long") from None

    async def _follow(self, url: str, check_redirect: CheckRedirect, wanted: Wanted, timeout: asyncio.Timeout) -> Page:
        start = url
        for _ in range(self._limits.max_redirects + 1):
            try:
                response = await self._get(url, wanted, timeout)
            except UnsafeUrlError as error:
                if url == start:
                    raise
                raise UnusablePageError(f"it redirects to {url}: {error}") from None
            if response.status not in REDIRECTS:
                return self._page(url, response, wanted)
            location = response.fields["location"]
            target = normalize_url(location, base=url)
            if target is None:
                raise UnusablePageError(f"it redirects to {location[:100]!r}, which is no http or https address")
            if checking := check_redirect(target):
                await checking
            url = target
        raise TooManyRedirectsError(f"it redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: str, wanted: Wanted, timeout: asyncio.Timeout) -> Response:
        """What is remembered of `url`, or the server's answer when it is the turn of `url`."""
        loop = asyncio.get_running_loop()

        async def send(more: Mapping[str, str]) -> Response:
            left_s = (timeout.when() or 0.0) - loop.time()

            async def request() -> Response:
                nonlocal left_s
                timeout.reschedule(loop.time() + left_s)
                try:
                    return await self._request(url, wanted, more)
                finally:
                    if not timeout.expired():
                        left_s = (timeout.when() or 0.0) - loop.time()
                        timeout.reschedule(None)

            timeout.reschedule(None)
            try:
                return await self._turns.ask(url, request)
            finally:
                if not timeout.expired():
                    timeout.reschedule(loop.time() + left_s)

        if not wanted.is_remembered:
            return await send({})
        return await self._remembered.answer(url, wanted.accept, send)

    async def _request(self, url: str, wanted: Wanted, more: Mapping[str, str]) -> Response:
        self._check_crawl_bytes()
        headers = {"Host": urlsplit(url).netloc, **self._headers, "Accept": wanted.accept, **more}
        async with self._connections.stream("GET", _as_it_is(url), headers=list(_encoded(headers))) as response:
            stream = response.extensions["network_stream"]
            if isinstance(stream, CountedStream):
                stream.begin_body(self._max_raw_bytes)
            if len(response.headers) > MAX_HEADER_FIELDS:
                raise UnusablePageError(f"the server sends {len(response.headers)} header fields")
            fields = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            if (response.status in REDIRECTS and "location" in fields) or (more and response.status == NOT_MODIFIED):
                return Response(response.status, fields)
            if not 200 <= response.status < 300:
                raise HttpStatusError(response.status, _seconds(fields.get("retry-after", "")))
            _kind(fields, wanted)
            return Response(response.status, fields, *await self._read(response, fields, wanted))

    def _page(self, url: str, response: Response, wanted: Wanted) -> Page:
        """Checked anew: it may have been remembered by a program with other limits."""
        kind = _kind(response.fields, wanted)
        body, is_cut = response.body, response.is_cut
        if len(body) > self._max_bytes(wanted):
            body, is_cut = self._cut(body, wanted)
        if not wanted.is_lenient and (not body or body.isspace()):
            raise UnusablePageError("it is empty")
        parameters = response.fields.get("content-type", "").partition(";")[2]
        charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
        return Page(url, kind, charset[1] if charset else "", body, is_cut)

    async def _read(self, response: httpcore.Response, fields: Mapping[str, str], wanted: Wanted) -> tuple[bytes, bool]:
        """The body, and whether there is more of it."""
        encoding = fields.get("content-encoding", "identity").strip().lower() or "identity"
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise UnusablePageError(f"it is compressed as {encoding[:50]!r}, which was not asked for")
        body = bytearray()
        num_raw_bytes = 0
        max_bytes = self._max_bytes(wanted)
        decompressor = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        stream = response.extensions["network_stream"]
        try:
            async for raw in response.aiter_stream():
                if decompressor and decompressor.eof:
                    break  # as browsers do, whatever it is that follows
                num_raw_bytes += len(raw)
                self._num_bytes += len(raw)
                self._check_crawl_bytes()
                if isinstance(stream, CountedStream):
                    stream.check_overhead(num_raw_bytes, MAX_OVERHEAD_BYTES)
                for piece in [raw] if decompressor is None else _decompress(decompressor, raw):
                    body += piece
                    if len(body) > max_bytes:
                        break
                    await asyncio.sleep(0)  # 64 KiB may hold 64 MiB
                if max(num_raw_bytes, len(body)) > max_bytes:
                    return self._cut(bytes(body), wanted)
        except NETWORK_ERRORS as error:
            raise UnusablePageError(f"its connection broke off: {_describe(error)}") from error
        except zlib.error as error:
            raise UnusablePageError(f"its compression is damaged: {error}") from error
        if decompressor and num_raw_bytes and not decompressor.eof:
            raise UnusablePageError("its compression is damaged: it ends too early")
        return bytes(body), False

    def _max_bytes(self, wanted: Wanted) -> int:
        return min(self._limits.max_body_bytes, wanted.max_bytes or self._limits.max_body_bytes)

    def _cut(self, body: bytes, wanted: Wanted) -> tuple[bytes, bool]:
        if not wanted.is_lenient:
            raise UnusablePageError(f"it is larger than max_body_bytes={self._limits.max_body_bytes}")
        return body[: self._max_bytes(wanted)], True

    def _check_crawl_bytes(self) -> None:
        if self._limits.max_crawl_bytes is not None and self._num_bytes > self._limits.max_crawl_bytes:
            raise OwnLimitError(f"the crawl has had max_crawl_bytes={self._limits.max_crawl_bytes}")


def _as_it_is(url: str) -> httpcore.URL:
    """httpcore itself drops what stands behind a semicolon in the last part of a path."""
    parts = urlsplit(url)
    target = parts.path + ("?" + parts.query if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target)


def _decompress(decompressor: "zlib._Decompress", raw: bytes) -> Iterable[bytes]:
    """In pieces, up to the end of the compressed stream: zlib would keep all that is fed to it behind that."""
    while not decompressor.eof and (piece := decompressor.decompress(raw, PIECE_BYTES)):
        yield piece
        raw = decompressor.unconsumed_tail


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _encoded(headers: Mapping[str, str]) -> Iterable[tuple[bytes, bytes]]:
    """As Latin-1, in which they came: what is sent back of a server's own fields may be anything else than ASCII."""
    return ((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())


def _kind(fields: Mapping[str, str], wanted: Wanted) -> Kind:
    if wanted.kinds is None:
        return "text"
    media_type = fields.get("content-type", "text/html").partition(";")[0].strip().lower()
    if media_type not in wanted.kinds:
        raise UnusablePageError(f"it is {media_type[:100]}, not {wanted.what}")
    return wanted.kinds[media_type]


def _seconds(retry_after: str) -> float | None:
    """What `Retry-After` asks for: a number of seconds, or a date."""
    if re.fullmatch(r"\d{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
