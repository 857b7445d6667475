"""What fetching a page is about: what is asked for, what comes back, what goes wrong, and who may have a say in it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from streamrag.errors import SourceError, UnreachableError

T = TypeVar("T")

NOT_MODIFIED = 304


class UnusablePageError(SourceError):
    """An address was reached, but what it gave cannot be used."""


class OwnLimitError(UnusablePageError):
    """An address was not asked, or not to the end, because of a limit of the crawl that asks: another one may ask."""


class HttpStatusError(UnusablePageError):
    """The server's answer is an error."""

    def __init__(self, status: int, retry_after_s: float | None = None) -> None:
        asked = "" if retry_after_s is None else f", and asks to wait for {retry_after_s:g} s"
        super().__init__(f"the server answers HTTP {status}{asked}")
        self.status = status
        self.retry_after_s = retry_after_s
        """Seconds to wait before the next request, if the server says so."""


class TooManyRedirectsError(UnusablePageError):
    """A redirect leads to a redirect, and so on."""


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
    max_crawl_bytes: int | None = None
    """Of all bodies together, before decompression."""


Kind: TypeAlias = Literal["html", "text", "pdf", "xml", "browser"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for."""

    kinds: Mapping[str, Kind] | None
    """By media type; None takes every type for text."""
    accept: str
    what: str = "a web page"
    max_bytes: int | None = None
    """If that is less than `max_body_bytes`."""
    is_lenient: bool = False
    """A body that is too large is cut, and it may be empty."""
    is_remembered: bool = True
    """Whether what is kept on disk will do."""


PAGES = Wanted(
    {
        "text/html": "html",
        "application/xhtml+xml": "html",
        "text/plain": "text",
        "text/markdown": "text",
        "application/pdf": "pdf",
        "application/x-pdf": "pdf",
    },
    "text/html, application/xhtml+xml, text/plain;q=0.5, application/pdf;q=0.5",
)


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered: a body, a redirect, or that what we have is still good (304)."""

    status: int
    fields: Mapping[str, str]
    """By name in lower case. Of those that come twice, the last."""
    body: bytes = b""
    is_cut: bool = False
    """Whether there is more of the body than was read."""


@dataclass(frozen=True, slots=True)
class Page:
    """What an address gave."""

    url: str
    """After redirects."""
    kind: Kind
    charset: str
    """As the server declares it; empty if it does not."""
    body: bytes
    is_cut: bool = False
    """Whether there is more of the body than was read."""


CheckRedirect: TypeAlias = Callable[[str], Awaitable[None] | None]
"""Raises for an address that is not to be followed."""

Send: TypeAlias = Callable[[Mapping[str, str]], Awaitable[Response]]
"""Sends a request with these header fields beside the usual ones."""


class Turns:
    """When a request may be sent: at once. `politeness.CrawlTurns` knows better."""

    async def ask(self, url: str, send: Callable[[], Awaitable[T]]) -> T:
        """What `send` returns, when it is the turn of `url`."""
        return await send()


class Remembered:
    """What earlier requests brought: nothing. `page_cache.PageCache` knows better."""

    async def answer(self, url: str, accept: str, send: Send) -> Response:
        """What is remembered of `url`, or what `send` returns."""
        return await send({})
