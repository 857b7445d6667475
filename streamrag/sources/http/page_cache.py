"""What servers answered, kept on disk as HTTP's rules for caches allow: RFC 9111, by hishel.

    kept, and fresh       used without a request
    kept, and stale       asked for with its validators (ETag, Last-Modified); a 304 makes it fresh again
    not kept, or damaged  asked for

What was fetched with `allow_private` is kept apart from what was fetched without: a source that may not fetch from
private addresses is never given what another one has fetched there.
"""

import itertools
import json
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.fetched import NOT_MODIFIED, Remembered, Response, Send
from streamrag.sources.threads import Threads

if TYPE_CHECKING:
    import hishel

KEPT_STATUS = {200, 301, 308}

NOT_KEPT = {"connection", "content-encoding", "content-length", "keep-alive", "set-cookie", "transfer-encoding"}
"""Fields of one connection, or of a body before it was decompressed."""

MAX_THREADS = 4
VERSION = 1


class PageCache(Remembered):
    """The answers in a store, for sources of one kind (`allow_private`, `user_agent`)."""

    def __init__(self, store: DiskStore, *, allow_private: bool, user_agent: str) -> None:
        self._store = store
        self._kind = f"{'private' if allow_private else 'public'} {user_agent}"
        self._threads = Threads(MAX_THREADS, "page cache")

    async def answer(self, url: str, accept: str, send: Send) -> Response:
        import hishel  # no part of a plain installation

        key = f"page {VERSION} {self._kind} {accept} {url}"
        kept = await self._threads.run(partial(self._get, key))
        bodies: dict[uuid.UUID, bytes] = {}
        entries: list[hishel.Entry] = []
        request = hishel.Request("GET", url)
        if kept:
            number = uuid.uuid4()
            bodies[number] = kept.body
            entries.append(hishel.Entry(number, request, _to_hishel(kept)))
        options = hishel.CacheOptions(shared=False, supported_methods=["GET"], allow_stale=False)
        state: Any = hishel.IdleClient(options=options).next(request, entries)
        if isinstance(state, hishel.FromCache):
            return _from_hishel(state.entry.response, bodies[state.entry.id])
        asked = {name.title(): value for name, value in state.request.headers.items()}
        answered = await send(asked)
        for _ in range(4):  # it has fewer states
            if isinstance(state, hishel.NeedRevalidation):
                state = state.next(_to_hishel(answered))
            elif isinstance(state, hishel.CacheMiss):
                if answered.status == NOT_MODIFIED:  # of something that we do not have
                    answered = await send({})
                state = state.next(_to_hishel(answered))
            elif isinstance(state, hishel.NeedToBeUpdated):
                refreshed = state.updating_entries[0]
                answered = _from_hishel(refreshed.response, bodies[refreshed.id])
                await self._put(key, answered)
                return answered
            elif isinstance(state, hishel.StoreAndUse) and _is_worth_keeping(answered):
                await self._put(key, _from_hishel(state.response, answered.body))
                return answered
            elif isinstance(state, hishel.StoreAndUse | hishel.CouldNotBeStored):
                break
            else:  # entries are outdated: they will be replaced
                state = state.next()
        if kept:
            await self._threads.run(partial(self._store.remove, key))
        if answered.status == NOT_MODIFIED:
            answered = await send({})
        return answered

    def _get(self, key: str) -> Response | None:
        response = _decode(self._store.get(key) or b"")
        return _dated(response, 0.0) if response else None  # the clock was set back since: its age is not known

    async def _put(self, key: str, response: Response) -> None:
        await self._threads.run(partial(self._store.put, key, _encode(_dated(response, time.time()))))


def _is_worth_keeping(response: Response) -> bool:
    """Whether it is whole, and could ever be used again."""
    names = {"etag", "last-modified", "expires"}
    return (response.status in KEPT_STATUS and not response.is_cut) and (
        not names.isdisjoint(response.fields) or "max-age" in response.fields.get("cache-control", "").lower()
    )


def _dated(response: Response, otherwise_s: float) -> Response:
    """Return the response with a date that is past: its own if it has one. hishel takes any other for an age of 0."""
    with suppress(KeyError, ValueError, OverflowError):
        if parsedate_to_datetime(response.fields["date"]).timestamp() <= time.time():
            return response
    return replace(response, fields={**response.fields, "date": formatdate(otherwise_s, usegmt=True)})


def _to_hishel(response: Response) -> "hishel.Response":
    import hishel

    return hishel.Response(response.status, hishel.Headers(dict(response.fields)))


def _from_hishel(response: "hishel.Response", body: bytes) -> Response:
    return Response(response.status_code, dict(response.headers.items()), body)


def _encode(response: Response) -> bytes:
    fields = {name: value for name, value in response.fields.items() if name not in NOT_KEPT}
    return json.dumps([response.status, fields]).encode() + b"\n" + response.body


def _decode(kept: bytes) -> Response | None:
    """None if it is not what `_encode` writes: whoever may write to the folder may have put it there."""
    head, _, body = kept.partition(b"\n")
    try:
        status, fields = json.loads(head)
        texts = itertools.chain.from_iterable(fields.items())
        is_good = status in KEPT_STATUS and all(
            isinstance(text, str) and not re.search(r"[\r\n\0]", text) for text in texts
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    has_target = status == 200 or "location" in fields
    return Response(status, _latin(fields), body) if is_good and has_target else None


def _latin(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: value.encode("latin-1", errors="replace").decode("latin-1") for name, value in fields.items()}
