"""Rules for responses, a server's response, the page made of it, and internal errors of pages.

Users see UnreachableError and UnsafeUrlError of `streamrag.errors`; the errors below stay inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamrag.errors import SourceError, UnreachableError

Kind: TypeAlias = Literal["html", "text", "pdf", "xml", "browser"]


@dataclass(frozen=True, slots=True)
class ContentRules:
    """The content that a response may have."""

    kinds: Mapping[str, Kind] | None  # kinds by media type; None accepts every media type as text
    accept: str
    what: str = "a web page"
    max_bytes: int | None = None  # a limit below `max_body_bytes`
    is_lenient: bool = False  # whether a body may be empty, and is truncated if it is too large
    may_be_cached: bool = True


PAGES = ContentRules(
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
    """A response to one request: a body, a redirect, or 304 if the stored body is still valid."""

    status: int
    fields: Mapping[str, str]  # header fields by lower-case name; the last of repeated ones
    body: bytes = b""
    is_cut: bool = False  # whether the body was truncated


@dataclass(frozen=True, slots=True)
class Page:
    """A page after fetching, before cleaning."""

    url: str  # URL after redirects
    kind: Kind
    charset: str  # charset that the server declares, or empty
    body: bytes
    is_cut: bool = False  # whether the body was truncated
    refresh: str = ""  # the header `Refresh`


class UnusablePageError(SourceError):
    """A server responded, but the response cannot be used."""


class CostlyPageError(UnusablePageError):
    """A page exceeded its time, or a worker's time or memory."""


class DisallowedError(UnusablePageError):
    """The host's robots.txt disallows the page."""


class HttpStatusError(UnusablePageError):
    """The response has an error status."""

    def __init__(self, status: int, retry_after_s: float | None = None) -> None:
        wait = "" if retry_after_s is None else f", and asks to wait for {retry_after_s:g} s"
        super().__init__(f"the server answers HTTP {status}{wait}")
        self.status = status
        self.retry_after_s = retry_after_s  # seconds to wait before the next request, from `Retry-After`


class TooManyRedirectsError(UnusablePageError):
    """A chain of redirects is too long."""


class OwnLimitError(UnusablePageError):
    """A limit of this crawl prevented or interrupted a request; another crawl may still make it."""


class PutOffError(OwnLimitError):
    """The host's next permitted request is after the crawl's deadline."""


class NoConnectionError(UnreachableError):
    """A connection timed out."""


COSTLY_ERRORS = (CostlyPageError, NoConnectionError)
"""Errors that count against a host: after a few of them, the crawl abandons the host."""
