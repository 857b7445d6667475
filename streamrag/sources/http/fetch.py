"""Fetch web pages from allowed addresses, within limits, without blocking the event loop.

httpcore, the layer below httpx, lets us choose the address of a connection, keeps no cookies, reads no environment
variables, and returns undecoded bodies, so that a decompression bomb is stopped in time. `CountedStream` bounds what
httpcore itself buffers (heads, chunk sizes, trailers).
"""

import asyncio
import re
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeAlias
from urllib.parse import urlsplit

import httpcore

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.http.page import (
    PAGES,
    ContentRules,
    CostlyPageError,
    HttpStatusError,
    Kind,
    NoConnectionError,
    OwnLimitError,
    Page,
    Response,
    TooManyRedirectsError,
    UnusablePageError,
)
from streamrag.sources.http.page_cache import NOT_MODIFIED, PageCache
from streamrag.sources.http.politeness import CrawlTurns
from streamrag.sources.http.ssrf_guard import GuardedBackend, Resolve
from streamrag.sources.http.urls import normalize_url
from streamrag.support.counted_stream import CountedStream, ResponseTooLargeError
from streamrag.support.messages import message_of

PIECE_BYTES = 1 << 16  # bytes to decompress at a time
MAX_HEADER_FIELDS = 200
MAX_REDIRECTS = 5

MAX_OVERHEAD_BYTES = 1 << 16
"""Bytes of a response beside its body (heads, trailers, chunk sizes); a longer body may have its own length of them."""

REDIRECTS = {301, 302, 303, 307, 308}
NETWORK_ERRORS = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)

CheckRedirect: TypeAlias = Callable[[str], Awaitable[None] | None]
"""A function that raises for a redirect target that must not be followed."""


class _TimeBudget:
    """The seconds that remain for the requests of a page."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        """Subtract the duration of the block, which ends with a TimeoutError when the budget is used up."""
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                yield
        finally:
            self._left_s -= time.monotonic() - start_s


@dataclass(kw_only=True, eq=False)
class Fetcher:
    """A connection pool for one crawl. No socket is left open after `aclose`.

    page_timeout_s: seconds for all requests of a page, redirects included. Waiting for a turn does not count.
    connect_timeout_s: seconds for resolving a name and connecting, for each redirect.
    max_body_bytes: bytes of a body, before and after decompression.
    max_crawl_bytes: bytes of all bodies together, before decompression.
    ssl_context: a shared context, because creating one takes milliseconds.
    """

    page_timeout_s: float
    connect_timeout_s: float
    max_body_bytes: int
    max_crawl_bytes: int | None = None
    allow_private: bool
    user_agent: str
    ssl_context: ssl.SSLContext
    resolve: Resolve
    turns: CrawlTurns | None = None
    cache: PageCache | None = None
    more_headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._headers = {"User-Agent": self.user_agent, "Accept-Encoding": "gzip", **(self.more_headers or {})}
        self._num_bytes = 0
        self._backend = GuardedBackend(
            connect_timeout_s=self.connect_timeout_s, allow_private=self.allow_private, resolve=self.resolve
        )
        self._connections = httpcore.AsyncConnectionPool(
            ssl_context=self.ssl_context, network_backend=self._backend, max_connections=None
        )

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def fetch(self, url: str, check_redirect: CheckRedirect, rules: ContentRules = PAGES) -> Page:
        """Return the page at `url`, fetched or cached, following redirects for which `check_redirect` does not raise.

        :raises UnreachableError: there was no response because of the network.
        :raises UnsafeUrlError: `url` itself is at an address that is not allowed.
        :raises CostlyPageError: the responses took more than `page_timeout_s`.
        :raises HttpStatusError: the response has an error status.
        :raises UnusablePageError: the response cannot be used, or the crawl has reached `max_crawl_bytes`.
        """
        try:
            return await self._follow(url, check_redirect, rules)
        except TimeoutError:
            raise CostlyPageError(f"it did not end within {self.page_timeout_s:g} s") from None
        except ResponseTooLargeError as error:
            raise UnusablePageError(str(error)) from None
        except NETWORK_ERRORS as error:
            kind = NoConnectionError if isinstance(error, httpcore.ConnectTimeout) else UnreachableError
            raise kind(f"{url} cannot be reached: {message_of(error)}") from error

    async def check_address(self, url: str) -> None:
        """Check the addresses of the host of `url` before a browser fetches it.

        :raises UnreachableError: the host has no address, or its name is not resolved in time.
        :raises UnsafeUrlError: the host is at an address that is not allowed.
        """
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await self._backend.check(parts.hostname or "", parts.port or 80)
        except httpcore.ConnectError as error:
            raise UnreachableError(f"{url} cannot be reached: {error}") from error
        except TimeoutError:
            raise NoConnectionError(f"{url} cannot be reached: resolving its name takes too long") from None

    async def _follow(self, start: str, check_redirect: CheckRedirect, rules: ContentRules) -> Page:
        """Return the page after at most `MAX_REDIRECTS` redirects, each passed to `check_redirect`.

        More redirects, or one to an unsafe address or to a URL that is not http, are an UnusablePageError.
        """
        budget = _TimeBudget(self.page_timeout_s)
        url = start
        for _ in range(MAX_REDIRECTS + 1):
            try:
                response = await self._get(url, rules, budget)
            except UnsafeUrlError as error:
                if url == start:
                    raise
                raise UnusablePageError(f"it redirects to {url}: {error}") from None
            if response.status not in REDIRECTS:
                return self._page(url, response, rules)
            location = _utf8(response.fields["location"])
            target = normalize_url(location, base=url)
            if target is None:
                raise UnusablePageError(f"it redirects to {location[:100]!r}, which is not an http or https URL")
            if check := check_redirect(target):
                await check
            url = target
        raise TooManyRedirectsError(f"it redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: str, rules: ContentRules, budget: _TimeBudget) -> Response:
        """Return the cached response if `rules` allow it, or the server's, requested at the turn of `url`.

        Only requests are subtracted from `budget`, not the wait for a turn.
        """

        async def send(validators: Mapping[str, str]) -> Response:
            async def request() -> Response:
                async with budget.spend():
                    return await self._request(url, rules, validators)

            return await (self.turns.ask(url, request) if self.turns else request())

        return await (self.cache.answer(url, rules.accept, send) if self.cache and rules.may_be_cached else send({}))

    async def _request(self, url: str, rules: ContentRules, validators: Mapping[str, str]) -> Response:
        """Send one GET, and return the response: a 2xx with its body, or the fields of a redirect or a requested 304.

        Another status, or a redirect without location, is an HttpStatusError. An UnusablePageError is a wrong media
        type, too many header fields, a reached `max_crawl_bytes`, or a body that is damaged, incomplete, compressed
        otherwise than requested, or over `max_body_bytes` (lenient `rules` cut the body instead).
        """
        self._check_crawl_bytes()
        headers = {"Host": urlsplit(url).netloc, **self._headers, "Accept": rules.accept, **validators}
        # Latin-1 as when received: validators are the server's own fields, which need not be ASCII.
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        async with self._connections.stream("GET", _to_httpcore(url), headers=encoded) as response:
            stream = response.extensions["network_stream"]
            assert isinstance(stream, CountedStream)
            stream.begin_body(2 * self.max_body_bytes + MAX_OVERHEAD_BYTES)
            if len(response.headers) > MAX_HEADER_FIELDS:
                raise UnusablePageError(f"the server sends {len(response.headers)} header fields")
            fields = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            is_not_modified = validators and response.status == NOT_MODIFIED
            if is_not_modified or (response.status in REDIRECTS and "location" in fields):
                return Response(response.status, fields)
            if not 200 <= response.status < 300:
                raise HttpStatusError(response.status, _parse_retry_after(fields.get("retry-after", "")))
            _kind(fields, rules)
            return Response(response.status, fields, *await self._read(response, fields, rules))

    async def _read(
        self, response: httpcore.Response, fields: Mapping[str, str], rules: ContentRules
    ) -> tuple[bytes, bool]:
        """Return the decompressed body, and whether it was truncated to the limit, which only lenient `rules` permit.

        Otherwise a body that is too large, before or after decompression, is an UnusablePageError. In any case, a
        damaged or incomplete body is one, a compression other than gzip and deflate, and reaching `max_crawl_bytes`.
        """
        encoding = fields.get("content-encoding", "").strip().lower() or "identity"
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise UnusablePageError(f"it is compressed as {encoding[:50]!r}, which was not requested")
        decompressor = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        body = bytearray()
        num_raw_bytes = 0
        max_bytes = self._max_bytes(rules)
        stream: CountedStream = response.extensions["network_stream"]
        try:
            async for raw in response.aiter_stream():
                if decompressor and decompressor.eof:
                    break  # ignore trailing data, as browsers do
                num_raw_bytes += len(raw)
                self._num_bytes += len(raw)
                self._check_crawl_bytes()
                stream.check_overhead(num_raw_bytes, MAX_OVERHEAD_BYTES)
                for piece in [raw] if decompressor is None else _decompress(decompressor, raw):
                    body += piece
                    if len(body) > max_bytes:
                        break
                    await asyncio.sleep(0)  # 64 KiB may decompress to 64 MiB
                if max(num_raw_bytes, len(body)) > max_bytes:
                    return self._cut(bytes(body), rules)
        except NETWORK_ERRORS as error:
            raise UnusablePageError(f"its connection broke off: {message_of(error)}") from error
        except zlib.error as error:
            raise UnusablePageError(f"its compression is damaged: {error}") from error
        if decompressor and num_raw_bytes and not decompressor.eof:
            raise UnusablePageError("its compression is damaged: it ends too early")
        return bytes(body), False

    def _page(self, url: str, response: Response, rules: ContentRules) -> Page:
        """Return the page at `url`, which is after redirects. The response may be cached from one with other limits.

        Raises UnusablePageError for a wrong media type and, unless `rules` are lenient, for a too large body, which
        those truncate, and for an empty or blank one without a header `Refresh`.
        """
        kind = _kind(response.fields, rules)
        body, is_cut = response.body, response.is_cut
        if len(body) > self._max_bytes(rules):
            body, is_cut = self._cut(body, rules)
        refresh = _utf8(response.fields.get("refresh", ""))
        if not rules.is_lenient and not body.strip():
            if not refresh:
                raise UnusablePageError("it is empty")
            kind = "text"  # whatever it would be
        parameters = response.fields.get("content-type", "").partition(";")[2]
        charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
        return Page(url, kind, charset[1] if charset else "", body, is_cut, refresh)

    def _max_bytes(self, rules: ContentRules) -> int:
        return min(self.max_body_bytes, rules.max_bytes or self.max_body_bytes)

    def _cut(self, body: bytes, rules: ContentRules) -> tuple[bytes, bool]:
        """Return the body truncated, and True. Raises UnusablePageError unless the rules are lenient."""
        if not rules.is_lenient:
            raise UnusablePageError(f"it is larger than max_body_bytes={self.max_body_bytes}")
        return body[: self._max_bytes(rules)], True

    def _check_crawl_bytes(self) -> None:
        """Raise OwnLimitError once the crawl has fetched more than `max_crawl_bytes`."""
        if self.max_crawl_bytes is not None and self._num_bytes > self.max_crawl_bytes:
            raise OwnLimitError(f"the crawl has reached max_crawl_bytes={self.max_crawl_bytes}")


def _utf8(value: str) -> str:
    """Return the value of a header field in UTF-8, as browsers read addresses, or as it is if it is not that."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _to_httpcore(url: str) -> httpcore.URL:
    """Convert `url` part by part: httpcore's parser drops what follows a semicolon in the last path segment."""
    parts = urlsplit(url)
    target = parts.path + ("?" + parts.query if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target)


def _decompress(decompressor: "zlib._Decompress", raw: bytes) -> Iterable[bytes]:
    """Yield `raw` decompressed, up to the end of the stream: zlib would buffer all input after that."""
    while not decompressor.eof and (piece := decompressor.decompress(raw, PIECE_BYTES)):
        yield piece
        raw = decompressor.unconsumed_tail


def _kind(fields: Mapping[str, str], rules: ContentRules) -> Kind:
    """Return the media type's kind, by default HTML; text if the rules accept all. Else raises UnusablePageError."""
    if rules.kinds is None:
        return "text"
    media_type = fields.get("content-type", "text/html").partition(";")[0].strip().lower()
    if media_type not in rules.kinds:
        raise UnusablePageError(f"it is {media_type[:100]}, not {rules.what}")
    return rules.kinds[media_type]


def _parse_retry_after(retry_after: str) -> float | None:
    """Return the seconds to wait, for a number of seconds or a date, 0 for a past one; None if the field is neither."""
    if re.fullmatch(r"\d{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
