"""Errors of pages, for the package itself. Users see UnreachableError and UnsafeUrlError, of `streamrag.errors`."""

from streamrag.errors import SourceError, UnreachableError


class UnusablePageError(SourceError):
    """An address was reached, but what it gave cannot be used."""


class CostlyPageError(UnusablePageError):
    """A page took more time, or more of a worker, than it may."""


class DisallowedError(UnusablePageError):
    """A host does not want this page to be fetched by robots."""


class HttpStatusError(UnusablePageError):
    """The server's answer is an error."""

    def __init__(self, status: int, retry_after_s: float | None = None) -> None:
        wait = "" if retry_after_s is None else f", and asks to wait for {retry_after_s:g} s"
        super().__init__(f"the server answers HTTP {status}{wait}")
        self.status = status
        self.retry_after_s = retry_after_s
        """Seconds to wait before the next request, if the server says so."""


class TooManyRedirectsError(UnusablePageError):
    """A redirect leads to a redirect, and so on."""


class OwnLimitError(UnusablePageError):
    """An address was not asked, or not to the end, because of a limit of the crawl that asks: another one may ask."""


class PutOffError(OwnLimitError):
    """A host would have it asked for at a time when the crawl is over."""


class NoConnectionError(UnreachableError):
    """An address gave neither a connection nor a refusal in time."""


COSTLY_ERRORS = (CostlyPageError, NoConnectionError)
"""Errors of a host that takes too much: after some of them, no further page of it is worth waiting for."""
