"""The start URLs of a crawl: a list, or a function from the query to them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from streamrag.core import Skipped
from streamrag.errors import ConfigurationError, SourceError, StreamRagError, UnsafeUrlError
from streamrag.sources.http.urls import MAX_URL_CHARS, parse_start_url
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import call_for_list
from streamrag.support.messages import short_repr

StartUrls: TypeAlias = Iterable[str] | Callable[[str], Iterable[str] | Awaitable[Iterable[str]]]
"""URLs, or a function from the query to URLs, such as a web search. It runs in a thread unless it is async."""

MAX_CALLS = 32  # concurrent calls of the function


class StartUrlList:
    """The start URLs of a source.

    :raises ConfigurationError: `urls` is an empty list, or neither a list nor a function.
    :raises UnsafeUrlError: a URL in a list is neither http nor https.
    """

    def __init__(self, urls: StartUrls) -> None:
        self._urls = urls if callable(urls) else list(dict.fromkeys(map(parse_start_url, _check(urls))))
        if not self._urls:
            raise ConfigurationError("WebSource: there is no start URL")
        self.may_be_unsafe = callable(urls)  # the URLs do not come from the user
        self._threads = Threads(MAX_CALLS, "start URLs")

    async def find(self, query: str, timeout_s: float) -> tuple[list[str], list[Skipped]]:
        """Return the URLs of the list, or the function's URLs for `query` with a Skipped for each unusable one.

        :raises SourceError: the function failed, took longer than `timeout_s`, or returned only unusable URLs.
        :raises UnsafeUrlError: the function returned only URLs that are neither http nor https.
        """
        if not callable(self._urls):
            return self._urls, []
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                return _usable(await call_for_list(self._urls, query, _check, self._threads))
        except StreamRagError:
            raise
        except Exception as error:
            what = f"took longer than {timeout_s:g} s" if timeout.expired() else f"raised {short_repr(error)}"
            raise SourceError(f"the function that gives WebSource its start URLs {what}") from error


def _check(urls: object) -> Iterable[object]:
    """Return `urls`; raise ConfigurationError if it is a text or not iterable."""
    if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
        raise ConfigurationError(f"WebSource: start URLs are a list, as in [{urls!r}]")
    return urls


def _usable(urls: list[object]) -> tuple[list[str], list[Skipped]]:
    """Return the usable URLs, normalized and without duplicates, and a Skipped for each unusable one.

    If there are only unusable ones, raise UnsafeUrlError if all are unsafe, else SourceError. No URLs are no error.
    """
    usable: dict[str, None] = {}
    unusable: list[Skipped] = []
    errors: list[StreamRagError] = []
    for url in urls:
        try:
            usable[parse_start_url(url)] = None
        except (ConfigurationError, UnsafeUrlError) as error:
            errors.append(error)
            source = str(url)[:MAX_URL_CHARS].encode(errors="replace").decode()  # without lone surrogates
            unusable.append(Skipped(source, str(error)[: 2 * MAX_URL_CHARS]))
    if errors and not usable:
        kind = UnsafeUrlError if all(isinstance(error, UnsafeUrlError) for error in errors) else SourceError
        raise kind(f"none of the start URLs that WebSource's function gave can be used; {errors[0]}") from errors[0]
    return list(usable), unusable
