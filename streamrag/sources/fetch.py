"""Fetching web pages from addresses that may be fetched, within limits, without ever blocking the event loop.

httpcore, the layer below httpx, is used directly: it lets us choose the address that a connection goes to, sends no
cookies from one page to the next, reads no environment, and hands over bodies undecoded, so that a small page that
decompresses to gigabytes is stopped in time.
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
from streamrag.sources.addresses import CheckedBackend, Resolve, normalize_url, resolve

__all__ = ["FetchLimits", "Fetcher", "Page", "UnusablePageError"]

PIECE_BYTES = 1 << 16
"""Decompressed at a time."""

REDIRECTS = {301, 302, 303, 307, 308}
HTML_TYPES = {"text/html", "application/xhtml+xml"}
TEXT_TYPES = {"text/plain", "text/markdown"}
NETWORK_ERRORS = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class UnusablePageError(SourceError):
    """An address was reached, but what it gave cannot be used."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a page may cost, and where it may be."""

    page_timeout_s: float
    """From its first redirect to its last byte."""
    connect_timeout_s: float
    """For resolving a name and connecting, at each redirect."""
    max_body_bytes: int
    """After decompression."""
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

    def __init__(
        self, limits: FetchLimits, *, user_agent: str, ssl_context: ssl.SSLContext, resolve: Resolve = resolve
    ) -> None:
        self._limits = limits
        self._headers: dict[str | bytes, str | bytes] = {
            "User-Agent": user_agent,
            "Accept": "text/html, application/xhtml+xml, text/plain;q=0.5",
            "Accept-Encoding": "gzip",
        }
        self._backend = CheckedBackend(
            connect_timeout_s=limits.connect_timeout_s, allow_private=limits.allow_private, resolve=resolve
        )
        self._connections = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context, network_backend=self._backend, max_connections=None
        )

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def fetch(self, url: str, check_redirect: Callable[[str], None]) -> Page:
        """The page at `url`, or where it redirects to if `check_redirect` does not raise for it.

        :raises UnreachableError: there was no answer because of the network.
        :raises UnsafeUrlError: `url` itself is at an address that is not allowed.
        :raises UnusablePageError: the answer is of no use, or comes too slowly.
        """
        try:
            async with asyncio.timeout(self._limits.page_timeout_s):
                return await self._follow(url, check_redirect)
        except TimeoutError:
            raise UnusablePageError(f"it did not end within {self._limits.page_timeout_s:g} s") from None
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
            raise UnreachableError(f"{url} cannot be reached: resolving its name takes too long") from None

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
        host = urlsplit(url).netloc
        async with self._connections.stream("GET", url, headers={"Host": host, **self._headers}) as response:
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
        decompressor = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        try:
            async for raw in response.aiter_stream():
                for piece in [raw] if decompressor is None else _decompress(decompressor, raw):
                    body += piece
                    await asyncio.sleep(0)  # 64 KiB may hold 64 MiB
                    if len(body) > self._limits.max_body_bytes:
                        raise UnusablePageError(f"it is larger than max_body_bytes={self._limits.max_body_bytes}")
        except NETWORK_ERRORS as error:
            raise UnusablePageError(f"its connection broke off: {_describe(error)}") from error
        except zlib.error as error:
            raise UnusablePageError(f"its compression is damaged: {error}") from error
        return bytes(body)


def _decompress(decompressor: "zlib._Decompress", raw: bytes) -> Iterable[bytes]:
    while piece := decompressor.decompress(raw, PIECE_BYTES):
        yield piece
        raw = decompressor.unconsumed_tail


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
