"""The start URLs of a crawl: a list, or a function from the query to them, such as a search engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TypeAlias, cast

import httpx

from streamrag.core import Skipped
from streamrag.errors import ConfigurationError, SourceError, StreamRagError, UnsafeUrlError
from streamrag.sources.http.urls import MAX_URL_CHARS, parse_start_url
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import call_for_list
from streamrag.support.messages import message_of, short_repr
from streamrag.support.validation import Count, Seconds, validated
from streamrag.trace_context import trace_headers

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


FindUrls: TypeAlias = Callable[[str], Awaitable[list[str]]]

MAX_ANSWER_BYTES = 512 << 10  # parsed on the event loop; a page of results has some tens of kilobytes
MAX_QUERY_CHARS = 500  # search engines accept no longer queries


@validated
def search_engine(url: str, *, num_results: Count = 5, timeout_s: Seconds = 10.0) -> FindUrls:
    """Return a function from a query to the URLs that a search engine finds, for `WebSource(search_engine(...))`.

    The engine must have the JSON interface of SearXNG (`GET /search?q=...&format=json`, to be enabled in its settings).
    Run your own: requests go to `url` even if its address is private, with the query, and with the trace context of a
    traced query. Found URLs are checked like those of any function: one that is not allowed is skipped.

    url: the engine's URL, such as `http://127.0.0.1:8888`.
    num_results: maximum number of URLs.
    timeout_s: seconds for the engine's response.

    :raises ConfigurationError: an invalid value.
    :raises UnsafeUrlError: `url` is neither http nor https.
    :raises SourceError: from the returned function, if the engine does not respond as expected.
    """
    base = parse_start_url(url)

    async def find(query: str) -> list[str]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _ask(base, query)
        except TimeoutError:
            raise SourceError(f"the search engine at {base} did not answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise SourceError(f"the search engine at {base} cannot be reached: {message_of(error)}") from error
        return _addresses(answer, base)[:num_results]

    return find


async def _ask(base: str, query: str) -> bytes:
    """Return the body of the engine's response; raise SourceError for another status than 200 or too many bytes."""
    parameters = {"q": query[:MAX_QUERY_CHARS].encode(errors="replace").decode(), "format": "json"}
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", **trace_headers.get()}
    async with (
        httpx.AsyncClient(trust_env=False, headers=headers) as client,
        client.stream("GET", f"{base.rstrip('/')}/search", params=parameters) as response,
    ):
        if response.status_code != 200:
            hint = "; is json among search.formats in its settings?" if response.status_code == 403 else ""
            raise SourceError(f"the search engine at {base} answers HTTP {response.status_code}{hint}")
        body = bytearray()
        async with aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise SourceError(f"the search engine at {base} answers more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)


def _addresses(answer: bytes, base: str) -> list[str]:
    """Return the distinct URLs of the results in order; raise SourceError if `answer` is not in SearXNG's form."""
    try:
        results = json.loads(answer)["results"]
        return list(dict.fromkeys(result["url"] for result in results if isinstance(result["url"], str)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(
            f"the search engine at {base} does not answer as SearXNG does, with results that have a url"
        ) from error
