"""The robots.txt of each host, fetched once for all of its pages.

    found (2xx)                              its rules for our product token, and its crawl delay, apply
    missing (4xx; too many redirects)        all pages are allowed
    busy (429) or broken (5xx)               no page is allowed for FAILED_S
    no response (time, network)              as if broken, but the first time only for pages that waited for it

Source: RFC 9309, https://www.rfc-editor.org/rfc/rfc9309. It counts 429 as missing; we do not request pages of a host
that is too busy to send its robots.txt. It does not say how long a failure applies.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from streamrag.errors import UnreachableError
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import (
    ContentRules,
    CostlyPageError,
    DisallowedError,
    HttpStatusError,
    OwnLimitError,
    TooManyRedirectsError,
    UnusablePageError,
)
from streamrag.sources.http.urls import origin_of
from streamrag.sources.threads import Threads

if TYPE_CHECKING:
    from protego import Protego

ROBOTS = ContentRules(
    None, "text/plain, */*;q=0.1", "a robots.txt", max_bytes=500 << 10, is_lenient=True, may_be_cached=False
)
"""RFC 9309 has a crawler read the first 500 KiB and apply them for a day at most, regardless of HTTP caching rules: so
the page cache is not used."""

FOUND_S = 24 * 3600.0  # seconds for which rules apply; RFC 9309 allows a day
FAILED_S = 60.0  # seconds before another request after a failure
MAX_BYTES = 32 << 20  # memory of all remembered rules, as `Rules.num_bytes` estimates it
MAX_RULES = 5000  # rule lines that are read; further ones are ignored like those after 500 KiB
RULE_BYTES = 1500  # memory of a rule beside its text: twice that of a plain rule, for one with a dollar sign
MAX_DELAY_S = 1e9  # the longest delay that counts; longer than any crawl
SHORT_BYTES = 1 << 14  # rules up to this size are matched on the event loop, which takes less than 2 ms in any case
MAX_SITEMAPS = 20
MAX_LINE_CHARS = 4096  # characters of a line that are read; no URL that we request is longer

AGENT = re.compile(r"\s*user[ -]?agent\b\s*:?\s*([^#]*)", re.IGNORECASE)
TOKEN = re.compile(r"[a-z_-]+", re.IGNORECASE)
SITEMAP = re.compile(r"(sitemaps?|site-map)\b", re.IGNORECASE)
RULE = re.compile(r"allow|dis|dia|crawl|request|visit", re.IGNORECASE)
"""The beginning of a line that ends the user agents of a group."""

OTHER_ROBOT = "user-agent: -"


@dataclass(frozen=True, slots=True)
class Rules:
    parser: "Protego | None" = None  # None allows all pages
    num_bytes: int = 0
    delay_s: float = 0.0
    sitemaps: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    """The rules of one host, or an error for all of its pages."""

    result: Rules | UnusablePageError | UnreachableError | None = None
    valid_until: float = 0.0
    """Expiry by the event loop's clock. A page that arrived earlier uses the result, however long it waited."""
    num_silent: int = 0  # consecutive requests without a response
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def set(self, result: Rules | UnusablePageError | UnreachableError) -> None:
        """Set the result and its expiry: a day for rules, a minute for failures, at once for a first non-response."""
        self.result = result
        self.num_silent = self.num_silent + 1 if isinstance(result, CostlyPageError | UnreachableError) else 0
        failed_s = 0.0 if self.num_silent == 1 else FAILED_S
        self.valid_until = asyncio.get_running_loop().time() + (FOUND_S if isinstance(result, Rules) else failed_s)


class Robots:
    """An LRU cache of the rules of all hosts, for one source on one event loop."""

    def __init__(self, user_agent: str, threads: Threads) -> None:
        self._user_agent = user_agent
        self._threads = threads
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def check(self, url: str, fetcher: Fetcher) -> Rules:
        """Return the rules of the host of `url` if they allow `url`.

        :raises DisallowedError: they disallow it, or the host fails to send them.
        :raises UnsafeUrlError: the host is at an address that is not allowed.
        :raises UnreachableError: the host does not respond.
        :raises CostlyPageError: the host responds too slowly.
        :raises OwnLimitError: the crawl ends before the host responds.
        """
        rules = await self.rules(url, fetcher)
        if rules.parser is None:
            return rules
        can_fetch = partial(rules.parser.can_fetch, url, self._user_agent)
        if not (can_fetch() if rules.num_bytes <= SHORT_BYTES else await self._threads.run(can_fetch)):
            raise DisallowedError("robots.txt of its host does not allow it")
        return rules

    async def rules(self, url: str, fetcher: Fetcher) -> Rules:
        """Return the rules of a URL's host, fetched once for concurrent callers unless known. Raises as `check` does.

        A host that fails to send rules gives an error for a while: DisallowedError, or one for the lack of a response.
        """
        origin = origin_of(url)
        entry = self._entries.setdefault(origin, _Entry())
        self._entries.move_to_end(origin)
        arrived_at = asyncio.get_running_loop().time()
        async with entry.lock:  # single flight: if the page that fetches is cancelled, the next one fetches
            if entry.result is None or arrived_at >= entry.valid_until:
                entry.set(await self._fetch(origin, fetcher))
                self._evict()
        result = entry.result
        assert result
        if isinstance(result, Rules):
            return result
        raise type(result)(str(result).replace(f"{origin}/robots.txt cannot", f"{url} cannot", 1))

    async def _fetch(self, origin: str, fetcher: Fetcher) -> Rules | UnusablePageError | UnreachableError:
        """Return the fetched rules, which allow everything if robots.txt is missing, or the error to remember.

        :raises UnsafeUrlError: the host is at an address that is not allowed.
        :raises OwnLimitError: the crawl ends before the response; this is not remembered, because it is not the host's.
        """
        try:
            page = await fetcher.fetch(f"{origin}/robots.txt", lambda url: None, ROBOTS)
        except OwnLimitError:
            raise
        except TooManyRedirectsError:
            return Rules()
        except CostlyPageError as error:
            return CostlyPageError(f"robots.txt of its host cannot be read: {error}")
        except UnreachableError as error:
            return type(error)(str(error))
        except UnusablePageError as error:
            if isinstance(error, HttpStatusError) and 400 <= error.status < 500 and error.status != 429:
                return Rules()
            return DisallowedError(f"robots.txt of its host cannot be read ({error}), so nothing is allowed")
        return await self._threads.run(partial(parse, page.body, self._user_agent))

    def _evict(self) -> None:
        """Forget the least recently used hosts, except where a request runs, until the rest takes `MAX_BYTES`."""

        def num_bytes(entry: _Entry) -> int:
            return 1024 + (entry.result.num_bytes if isinstance(entry.result, Rules) else 0)

        total = sum(map(num_bytes, self._entries.values()))
        for origin, entry in list(self._entries.items())[:-1]:
            if total <= MAX_BYTES:
                break
            if not entry.lock.locked():
                total -= num_bytes(self._entries.pop(origin))


def parse(body: bytes, user_agent: str) -> Rules:
    """Return a robots.txt's rules, delay and sitemaps for `user_agent`. Call this in a thread: long files take time."""
    from protego import Protego  # an optional dependency

    tokens = {token.lower() for token in TOKEN.findall(user_agent)}
    text = "\n".join(_relevant_lines(tokens, body.decode(errors="replace").removeprefix("\ufeff")))
    parser = Protego.parse(text)
    rate = parser.request_rate(user_agent)
    rate_s = min(rate.seconds, MAX_DELAY_S) / min(rate.requests, MAX_DELAY_S) if rate else 0.0
    delay_s = max(parser.crawl_delay(user_agent) or 0.0, rate_s)
    sitemaps = tuple(dict.fromkeys(parser.sitemaps))[:MAX_SITEMAPS]
    num_bytes = 4 * len(text) + RULE_BYTES * (text.count("\n") + 1)
    return Rules(parser, num_bytes, delay_s, sitemaps)


def _relevant_lines(tokens: set[str], text: str) -> Iterator[str]:
    """Yield at most `MAX_SITEMAPS` sitemap lines, the user agents, and at most `MAX_RULES` rules for `tokens` or `*`.

    Other user agents are replaced by one name, and their rules are omitted, because Protego takes time quadratic in the
    number of user agents, and memory for each rule. Names must match as a whole (RFC 9309).
    """
    last_name = ""
    is_ours = in_names = False  # whether the group applies to us, and whether its user agents continue
    num_rules = num_sitemaps = 0
    for line in text.splitlines():
        line = line[:MAX_LINE_CHARS]
        if agent := AGENT.match(line):
            name = agent[1].strip().lower().partition("/")[0]
            is_named = name == "*" or name in tokens
            is_ours = is_named or (is_ours and in_names)
            in_names = True
            name = f"user-agent: {name}" if is_named else OTHER_ROBOT
            if name != OTHER_ROBOT or name != last_name:
                yield name
            last_name = name
            continue
        line = line.partition("#")[0].strip()
        if SITEMAP.match(line):
            num_sitemaps += 1
            if num_sitemaps <= MAX_SITEMAPS:
                yield line
        elif line:
            last_name = ""
            in_names = in_names and not RULE.match(line)
            num_rules += is_ours
            if is_ours and num_rules <= MAX_RULES:
                yield line
