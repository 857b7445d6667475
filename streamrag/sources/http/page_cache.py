"""A disk cache of HTTP responses after RFC 9111, whose rules hishel applies.

    stored and fresh        used without a request
    stored and stale        requested with its validators (ETag, Last-Modified); a 304 makes it fresh
    missing or damaged      requested

Responses fetched with and without `allow_private` are separate: a source that may not fetch from private addresses
never gets a response that another source fetched there.
"""

import itertools
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.page import Response
from streamrag.sources.threads import Threads

if TYPE_CHECKING:
    import hishel

NOT_MODIFIED = 304
STORED_STATUS = {200, 301, 308}

NOT_STORED = {"connection", "content-encoding", "content-length", "keep-alive", "set-cookie", "transfer-encoding"}
"""Header fields of a connection, or of the compressed body."""

MAX_THREADS = 4
VERSION = 1

SendRequest: TypeAlias = Callable[[Mapping[str, str]], Awaitable[Response]]
"""A function that sends the request with additional header fields."""


class PageCache:
    """A response cache in a store, for sources with the same `allow_private` and `user_agent`."""

    def __init__(self, store: DiskStore, *, allow_private: bool, user_agent: str) -> None:
        self._store = store
        self._kind = f"{'private' if allow_private else 'public'} {user_agent}"
        self._threads = Threads(MAX_THREADS, "page cache")

    async def answer(self, url: str, accept: str, send: SendRequest) -> Response:
        """Return the stored response for `url` if fresh, else the response of `send`, stored where HTTP permits.

        `send` gets the validators of a stale response. A 304 renews it; an answer that may not be stored removes it.
        """
        import hishel  # an optional dependency

        key = f"page {VERSION} {self._kind} {accept} {url}"
        stored = _decode(await self._threads.run(lambda: self._store.get(key) or b""))
        request = hishel.Request("GET", url)
        entries = [hishel.Entry(uuid.uuid4(), request, _to_hishel(stored))] if stored else []
        options = hishel.CacheOptions(shared=False, supported_methods=["GET"], allow_stale=False)
        state: Any = hishel.IdleClient(options=options).next(request, entries)
        if stored and isinstance(state, hishel.FromCache):
            return stored
        response = await send({name.title(): value for name, value in state.request.headers.items()})
        if to_store := _to_store(state, response, stored):
            content = _encode(_dated(to_store, time.time()))
            await self._threads.run(partial(self._store.put, key, content))
            return to_store
        if stored:
            await self._threads.run(partial(self._store.remove, key))
        return await send({}) if response.status == NOT_MODIFIED else response


def _to_store(state: Any, response: Response, stored: Response | None) -> Response | None:
    """Return the response to store and use, if any: `response`, or `stored` with the header fields of a 304."""
    import hishel

    for _ in range(4):  # hishel has fewer states
        if isinstance(state, hishel.NeedRevalidation | hishel.CacheMiss):
            state = state.next(_to_hishel(response))
        elif isinstance(state, hishel.NeedToBeUpdated) and stored:
            return replace(stored, fields=dict(state.updating_entries[0].response.headers.items()))
        elif isinstance(state, hishel.StoreAndUse) and _is_worth_storing(response):
            return replace(response, fields=dict(state.response.headers.items()))
        elif isinstance(state, hishel.StoreAndUse | hishel.CouldNotBeStored):
            return None
        else:  # the stored entries will be replaced
            state = state.next()
    return None


def _is_worth_storing(response: Response) -> bool:
    """Whether the body is complete, its status is in `STORED_STATUS`, and its fields have a validator or an expiry."""
    names = {"etag", "last-modified", "expires"}
    return (response.status in STORED_STATUS and not response.is_cut) and (
        not names.isdisjoint(response.fields) or "max-age" in response.fields.get("cache-control", "").lower()
    )


def _dated(response: Response, otherwise_s: float) -> Response:
    """Return the response with a past date: its own, or `otherwise_s`. hishel assumes an age of 0 for other dates."""
    with suppress(KeyError, ValueError, OverflowError):
        if parsedate_to_datetime(response.fields["date"]).timestamp() <= time.time():
            return response
    return replace(response, fields={**response.fields, "date": formatdate(otherwise_s, usegmt=True)})


def _to_hishel(response: Response) -> "hishel.Response":
    import hishel

    return hishel.Response(response.status, hishel.Headers(dict(response.fields)))


def _encode(response: Response) -> bytes:
    fields = {name: value for name, value in response.fields.items() if name not in NOT_STORED}
    return json.dumps([response.status, fields]).encode() + b"\n" + response.body


def _decode(content: bytes) -> Response | None:
    """Return the response, or None if `_encode` did not write it: other programs may write to the folder."""
    head, _, body = content.partition(b"\n")
    try:
        status, fields = json.loads(head)
        texts = itertools.chain.from_iterable(fields.items())
        is_good = status in STORED_STATUS and all(
            isinstance(text, str) and not re.search(r"[\r\n\0]", text) for text in texts
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if not is_good or (status != 200 and "location" not in fields):
        return None
    latin = {name: value.encode("latin-1", errors="replace").decode("latin-1") for name, value in fields.items()}
    return _dated(Response(status, latin, body), 0.0)  # if the clock was set back, the age is unknown
