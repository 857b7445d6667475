"""Search engines as start addresses: a function from the query to addresses, as `WebSource` takes it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

import httpx

from streamrag.core.trace_context import trace_headers
from streamrag.errors import SourceError
from streamrag.sources.http.urls import parse_start_url
from streamrag.support.validation import Count, Seconds, validated

FindUrls: TypeAlias = Callable[[str], Awaitable[list[str]]]

MAX_ANSWER_BYTES = 512 << 10  # it is read on the event loop. A page of results is some tens of kilobytes
MAX_QUERY_CHARS = 500  # search engines take no longer questions


@validated
def search_engine(url: str, *, num_results: Count = 5, timeout_s: Seconds = 10.0) -> FindUrls:
    """Return a function from a query to the addresses that a search engine finds, for `WebSource(search_engine(...))`.

    It speaks the JSON interface of SearXNG (`GET /search?q=...&format=json`, to be switched on in its settings). Run
    one of your own: the engine is asked at `url` whatever address that is, and is sent the query, and its trace's
    context if it is traced. What it finds is checked like all that others give: an address that is not allowed is
    skipped.

    url: the engine's address, as `http://127.0.0.1:8888`.
    num_results: the most addresses that it gives.
    timeout_s: seconds for its answer.

    :raises ConfigurationError: a value that cannot work.
    :raises SourceError: when it is called and the engine does not answer, or not as it should.
    """
    base = parse_start_url(url)

    async def find(query: str) -> list[str]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _ask(base, query)
        except TimeoutError:
            raise SourceError(f"the search engine at {base} did not answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise SourceError(
                f"the search engine at {base} cannot be asked: {error or type(error).__name__}"
            ) from error
        return _addresses(answer, base)[:num_results]

    return find


async def _ask(base: str, query: str) -> bytes:
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
    try:
        results = json.loads(answer)["results"]
        return list(dict.fromkeys(result["url"] for result in results if isinstance(result["url"], str)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(
            f"the search engine at {base} does not answer as SearXNG does, with results that have a url"
        ) from error
