"""Permission to fetch pages: the robots.txt of a host, asked for once for all of its pages.

    robots.txt is there (2xx)                    its rules for our product token, and its crawl delay
    it is not (4xx; too many redirects)          all is allowed
    busy (429), or broken (5xx)                  nothing is allowed, for FAILED_S
    no answer (time, network)                    as broken, but the first time only for pages that waited for it

Source: RFC 9309, https://www.rfc-editor.org/rfc/rfc9309. It counts 429 as "not there"; here, a host that is too busy to
say what it allows is not asked for its pages. It leaves open for how long a failure is believed.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from streamrag.errors import UnreachableError
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import ContentRules
from streamrag.sources.http.page_errors import (
    CostlyPageError,
    DisallowedError,
    HttpStatusError,
    OwnLimitError,
    TooManyRedirectsError,
    UnusablePageError,
)
from streamrag.sources.threads import Threads

if TYPE_CHECKING:
    from protego import Protego

ROBOTS = ContentRules(
    None, "text/plain, */*;q=0.1", "a robots.txt", max_bytes=500 << 10, is_lenient=True, may_be_cached=False
)
"""RFC 9309 wants the first 500 KiB to be read, whatever follows, and to be believed for a day at most, whatever its
server says about keeping: so none comes from disk."""

FOUND_S = 24 * 3600.0  # for which what a robots.txt says is believed; RFC 9309 allows a day
FAILED_S = 60.0  # for which one that cannot be had is not asked for again
MAX_BYTES = 32 << 20  # of all that are remembered together, as `Rules.num_bytes` counts them

MAX_RULES = 5000
"""Lines of a file that are read for rules; what follows is as if it stood behind the first half megabyte."""

RULE_BYTES = 1500  # memory that a line's rule takes, beside its text: twice, for one with a dollar sign
MAX_DELAY_S = 1e9  # the longest delay that is counted; any crawl ends before
SHORT_BYTES = 1 << 14  # up to so many, a page is looked up on the event loop: less than 2 ms, whatever is in the file
MAX_SITEMAPS = 20
MAX_LINE_CHARS = 4096  # of a line that are read; no address that we ask for is longer

AGENT = re.compile(r"\s*user[ -]?agent\b\s*:?\s*([^#]*)", re.IGNORECASE)
TOKEN = re.compile(r"[a-z_-]+", re.IGNORECASE)
SITEMAP = re.compile(r"(sitemaps?|site-map)\b", re.IGNORECASE)
RULE = re.compile(r"allow|dis|dia|crawl|request|visit", re.IGNORECASE)
"""Beginnings of the lines that end a group's names."""

OTHER_ROBOT = "user-agent: -"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one host."""

    parser: "Protego | None" = None
    """None: all is allowed."""
    agent: str = ""
    num_bytes: int = 0
    delay_s: float = 0.0
    sitemaps: tuple[str, ...] = ()

    async def allow(self, url: str, threads: Threads) -> bool:
        """Whether the page may be fetched."""
        if self.parser is None:
            return True
        if self.num_bytes <= SHORT_BYTES:
            return self.parser.can_fetch(url, self.agent)
        return await threads.run(partial(self.parser.can_fetch, url, self.agent))


@dataclass(slots=True)
class _Entry:
    """An answer about one host: its rules, or an error for all of its pages."""

    answer: Rules | UnusablePageError | UnreachableError | None = None
    until: float = 0.0
    """Time by the event loop's clock. A page that came before believes the answer, however long it waited for it."""
    num_silent: int = 0
    """Times in succession that there was no answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def set(self, answer: Rules | UnusablePageError | UnreachableError) -> None:
        self.answer = answer
        self.num_silent = self.num_silent + 1 if isinstance(answer, CostlyPageError | UnreachableError) else 0
        failed_s = 0.0 if self.num_silent == 1 else FAILED_S
        self.until = asyncio.get_running_loop().time() + (FOUND_S if isinstance(answer, Rules) else failed_s)


class Robots:
    """The robots.txt of all hosts, for a source's life. Belongs to one event loop."""

    def __init__(self, user_agent: str, threads: Threads) -> None:
        self._user_agent = user_agent
        self._threads = threads
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def check(self, url: str, fetcher: Fetcher) -> Rules:
        """Return the rules of the host of `url`, if they allow it.

        :raises DisallowedError: they do not.
        :raises UnsafeUrlError: the host is at an address that is not allowed.
        :raises UnreachableError: it does not answer.
        :raises CostlyPageError: it answers too slowly.
        :raises OwnLimitError: the crawl that asks ends before it answers.
        """
        rules = await self.rules(url, fetcher)
        if not await rules.allow(url, self._threads):
            raise DisallowedError("robots.txt of its host does not allow it")
        return rules

    async def rules(self, url: str, fetcher: Fetcher) -> Rules:
        """Return the rules of the host of `url`; raises what `check` raises about the host."""
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        entry = self._entries.setdefault(origin, _Entry())
        self._entries.move_to_end(origin)
        came_at = asyncio.get_running_loop().time()
        async with entry.lock:  # the page that has it fetches; if it is cancelled, the next one does
            if entry.answer is None or came_at >= entry.until:
                entry.set(await self._fetch(origin, fetcher))
                self._forget()
        answer = entry.answer
        assert answer
        if isinstance(answer, Rules):
            return answer
        raise type(answer)(str(answer).replace(f"{origin}/robots.txt cannot", f"{url} cannot", 1))

    async def _fetch(self, origin: str, fetcher: Fetcher) -> Rules | UnusablePageError | UnreachableError:
        """Return what the host says.

        :raises UnsafeUrlError: it is at an address that is not allowed.
        :raises OwnLimitError: the crawl that asks ends before; that says nothing of the host, and is not remembered.
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

    def _forget(self) -> None:
        def num_bytes(entry: _Entry) -> int:
            return 1024 + (entry.answer.num_bytes if isinstance(entry.answer, Rules) else 0)

        total = sum(map(num_bytes, self._entries.values()))
        for origin, entry in list(self._entries.items())[:-1]:
            if total <= MAX_BYTES:
                break
            if not entry.lock.locked():
                total -= num_bytes(self._entries.pop(origin))


def parse(body: bytes, user_agent: str) -> Rules:
    """Return the rules of a file. Call it in a thread: half a megabyte takes some tenths of a second."""
    from protego import Protego  # no part of a plain installation

    tokens = {token.lower() for token in TOKEN.findall(user_agent)}
    text = "\n".join(_relevant_lines(tokens, body.decode(errors="replace").removeprefix("\ufeff")))
    parser = Protego.parse(text)
    rate = parser.request_rate(user_agent)
    rate_s = min(rate.seconds, MAX_DELAY_S) / min(rate.requests, MAX_DELAY_S) if rate else 0.0
    delay_s = max(parser.crawl_delay(user_agent) or 0.0, rate_s)
    sitemaps = tuple(dict.fromkeys(parser.sitemaps))[:MAX_SITEMAPS]
    num_bytes = 4 * len(text) + RULE_BYTES * (text.count("\n") + 1)
    return Rules(parser, user_agent, num_bytes, delay_s, sitemaps)


def _relevant_lines(tokens: set[str], text: str) -> Iterator[str]:
    """Yield the lines that matter for us, at most `MAX_RULES` beside those that name sitemaps.

    All robots but ours are under one name, and what is for them alone is left out: Protego takes time that is quadratic
    in the number of robots, and memory for each rule. Names are compared whole, as RFC 9309 has it.
    """
    last_name = ""
    is_ours = in_names = False  # whether the group is ours, and whether its names are being read
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
