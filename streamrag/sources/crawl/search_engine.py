"""Start URLs from a search engine, for `WebSource`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

import httpx

from streamrag.errors import SourceError
from streamrag.sources.http.urls import parse_start_url
from streamrag.support.messages import message_of
from streamrag.support.validation import Count, Seconds, validated
from streamrag.trace_context import trace_headers

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
