"""Fetching web pages from addresses that may be fetched, within limits, without ever blocking the event loop.

httpcore, the layer below httpx, is used directly: it lets us choose the address that a connection goes to, sends no
cookies from one page to the next, reads no environment, and hands over bodies undecoded, so that a small page that
decompresses to gigabytes is stopped in time. What it reads itself (heads, chunk sizes, trailers) is bounded by
`CountedStream`.
"""

import asyncio
import re
import ssl
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import httpcore

from streamrag.errors import SourceError, UnreachableError, UnsafeUrlError
from streamrag.sources.addresses import CheckedBackend, Resolve, normalize_url
from streamrag.sources.counted import CountedStream, ResponseTooLargeError

PIECE_BYTES = 1 << 16
"""Bytes that are decompressed at a time."""

MAX_HEADER_FIELDS = 200

MAX_OVERHEAD_BYTES = 1 << 16
"""What a response may have beside its body: heads, trailers and the sizes of chunks. Beside a longer body, as much as
that."""

REDIRECTS = {301, 302, 303, 307, 308}
HTML_TYPES = {"text/html", "application/xhtml+xml"}
TEXT_TYPES = {"text/plain", "text/markdown"}
NETWORK_ERRORS = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class UnusablePageError(SourceError):
    """An address was reached, but what it gave cannot be used."""


class CostlyPageError(UnusablePageError):
    """A page took more time, or more of a worker, than it may."""


class NoConnectionError(UnreachableError):
    """There was neither a connection nor a refusal in time."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a page may cost, and where it may be."""

    page_timeout_s: float
    """From its first redirect to its last byte."""
    connect_timeout_s: float
    """For resolving a name and connecting, at each redirect."""
    max_body_bytes: int
    """Before and after decompression."""
    allow_private: bool
    max_redirects: int = 5


@dataclass(frozen=True, slots=True)
class Page:
    """What an address gave."""

    url: str
    """After redirects."""
    kind: Literal["html", "text"]
    charset: str
    """As the server declares it; empty if it does not."""
    body: bytes


class Fetcher:
    """The connections of one crawl.

    `ssl_context` takes milliseconds to make: share it. No socket is left open after `aclose`.
    """

    def __init__(self, limits: FetchLimits, *, user_agent: str, ssl_context: ssl.SSLContext, resolve: Resolve) -> None:
        self._limits = limits
        self._headers: dict[str | bytes, str | bytes] = {
            "User-Agent": user_agent,
            "Accept": "text/html, application/xhtml+xml, text/plain;q=0.5",
            "Accept-Encoding": "gzip",
        }
        self._backend = CheckedBackend(
            connect_timeout_s=limits.connect_timeout_s, allow_private=limits.allow_private, resolve=resolve
        )
        self._max_raw_bytes = 2 * limits.max_body_bytes + MAX_OVERHEAD_BYTES
        self._connections = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context, network_backend=self._backend, max_connections=None
        )

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def fetch(self, url: str, check_redirect: Callable[[str], None]) -> Page:
        """The page at `url`, or where it redirects to if `check_redirect` does not raise for it.

        :raises UnreachableError: there was no answer because of the network.
        :raises UnsafeUrlError: `url` itself is at an address that is not allowed.
        :raises CostlyPageError: the answer comes too slowly.
        :raises UnusablePageError: the answer is of no use.
        """
        try:
            async with asyncio.timeout(self._limits.page_timeout_s):
                return await self._follow(url, check_redirect)
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

    async def _follow(self, url: str, check_redirect: Callable[[str], None]) -> Page:
        start = url
        for _ in range(self._limits.max_redirects + 1):
            try:
                found = await self._get(url)
            except UnsafeUrlError as error:
                if url == start:
                    raise
                raise UnusablePageError(f"it redirects to {url}: {error}") from None
            if isinstance(found, Page):
                return found
            target = normalize_url(found, base=url)
            if target is None:
                raise UnusablePageError(f"it redirects to {found[:100]!r}, which is no http or https address")
            check_redirect(target)
            url = target
        raise UnusablePageError(f"it redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: str) -> Page | str:
        """The page, or the location that it redirects to."""
        headers = {"Host": urlsplit(url).netloc, **self._headers}
        async with self._connections.stream("GET", _as_it_is(url), headers=headers) as response:
            stream = response.extensions["network_stream"]
            if isinstance(stream, CountedStream):
                stream.begin_body(self._max_raw_bytes)
            if len(response.headers) > MAX_HEADER_FIELDS:
                raise UnusablePageError(f"the server sends {len(response.headers)} header fields")
            fields = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            if response.status in REDIRECTS and "location" in fields:
                return fields["location"]
            if not 200 <= response.status < 300:
                raise UnusablePageError(f"the server answers HTTP {response.status}")
            media_type, _, parameters = fields.get("content-type", "text/html").partition(";")
            media_type = media_type.strip().lower()
            if media_type not in HTML_TYPES | TEXT_TYPES:
                raise UnusablePageError(f"it is {media_type[:100]}, not a web page")
            charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
            body = await self._read(response, fields)
        if not body or body.isspace():
            raise UnusablePageError("it is empty")
        return Page(url, "html" if media_type in HTML_TYPES else "text", charset[1] if charset else "", body)

    async def _read(self, response: httpcore.Response, fields: dict[str, str]) -> bytes:
        encoding = fields.get("content-encoding", "identity").strip().lower() or "identity"
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise UnusablePageError(f"it is compressed as {encoding[:50]!r}, which was not asked for")
        body = bytearray()
        num_raw_bytes = 0
        decompressor = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        stream = response.extensions["network_stream"]
        try:
            async for raw in response.aiter_stream():
                if decompressor and decompressor.eof:
                    break  # as browsers do, whatever it is that follows
                num_raw_bytes += len(raw)
                self._check_size(num_raw_bytes)
                if isinstance(stream, CountedStream):
                    stream.check_overhead(num_raw_bytes, MAX_OVERHEAD_BYTES)
                for piece in [raw] if decompressor is None else _decompress(decompressor, raw):
                    body += piece
                    self._check_size(len(body))
                    await asyncio.sleep(0)  # 64 KiB may hold 64 MiB
        except NETWORK_ERRORS as error:
            raise UnusablePageError(f"its connection broke off: {_describe(error)}") from error
        except zlib.error as error:
            raise UnusablePageError(f"its compression is damaged: {error}") from error
        if decompressor and num_raw_bytes and not decompressor.eof:
            raise UnusablePageError("its compression is damaged: it ends too early")
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise UnusablePageError(f"it is larger than max_body_bytes={self._limits.max_body_bytes}")


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
