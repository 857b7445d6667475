"""Requests and answers: what may come, what came from a server, and the page that was made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["html", "text", "pdf", "xml", "browser"]


@dataclass(frozen=True, slots=True)
class ContentRules:
    """Rules for the content of an answer."""

    kinds: Mapping[str, Kind] | None
    """Kinds by media type; None takes every type for text."""
    accept: str
    what: str = "a web page"
    max_bytes: int | None = None
    """A limit below `max_body_bytes`."""
    is_lenient: bool = False
    """Whether a body that is too large is cut, and may be empty."""
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
    """A server's response to one request: a body, a redirect, or 304 if the stored body is still valid."""

    status: int
    fields: Mapping[str, str]
    """Header fields by name in lower case. Of those that come twice, the last."""
    body: bytes = b""
    is_cut: bool = False
    """Whether there is more of the body than was read."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was fetched."""

    url: str
    """Address after redirects."""
    kind: Kind
    charset: str
    """Charset that the server declares, or empty."""
    body: bytes
    is_cut: bool = False
    """Whether there is more of the body than was read."""
