"""What a host lets robots do: its robots.txt, asked for once for all of its pages.

    robots.txt is there (2xx)                    its rules for our product token, and its crawl delay
    it is not (4xx; too many redirects)          all is allowed
    busy (429), or broken (5xx)                  nothing is allowed, for FAILED_S
    no answer (time, network)                    as broken, but the first time only to those who waited for it

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

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.http.fetched import (
    CostlyPageError,
    HttpStatusError,
    NoConnectionError,
    OwnLimitError,
    TooManyRedirectsError,
    UnusablePageError,
    Wanted,
)
from streamrag.sources.threads import Threads

if TYPE_CHECKING:
    from protego import Protego

    from streamrag.sources.http.fetch import Fetcher

ROBOTS = Wanted(
    None, "text/plain, */*;q=0.1", "a robots.txt", max_bytes=500 << 10, is_lenient=True, is_remembered=False
)
"""RFC 9309 wants the first 500 KiB to be read, whatever follows, and to be believed for a day at most, whatever its
server says about keeping: so none comes from disk."""

FOUND_S = 24 * 3600.0
"""How long what a robots.txt says is believed. RFC 9309 allows a day."""

FAILED_S = 60.0
"""How long one that cannot be had is not asked for again."""

MAX_BYTES = 32 << 20
"""Of all that are remembered together, as `Rules.num_bytes` counts them."""

MAX_RULES = 5000
"""Lines of a file that are read for rules; what follows is as if it stood behind the first half megabyte."""

RULE_BYTES = 1500
"""What a line's rule takes in memory, beside its text: twice, for one with a dollar sign."""

MAX_DELAY_S = 1e9
"""The longest delay that is counted; any crawl ends before."""

SHORT_BYTES = 1 << 14
"""Up to so many, a page is looked up on the event loop: less than 2 ms, also in a file that is made to be slow."""

MAX_SITEMAPS = 20

MAX_LINE_CHARS = 4096
"""Characters of a line that are read; no address that we ask for is longer."""

AGENT = re.compile(r"\s*user[ -]?agent\b\s*:?\s*([^#]*)", re.IGNORECASE)
TOKEN = re.compile(r"[a-z_-]+", re.IGNORECASE)
SITEMAP = re.compile(r"(sitemaps?|site-map)\b", re.IGNORECASE)
RULE = re.compile(r"allow|dis|dia|crawl|request|visit", re.IGNORECASE)
"""How lines begin that end a group's names."""

NOBODY = "user-agent: -"


class DisallowedError(UnusablePageError):
    """A host does not want this page to be fetched by robots."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What one host says."""

    parser: "Protego | None" = None
    """None: all is allowed."""
    agent: str = ""
    num_bytes: int = 0
    delay_s: float = 0.0
    sitemaps: tuple[str, ...] = ()

    async def allows(self, url: str, threads: Threads) -> bool:
        if self.parser is None:
            return True
        if self.num_bytes <= SHORT_BYTES:
            return self.parser.can_fetch(url, self.agent)
        return await threads.run(partial(self.parser.can_fetch, url, self.agent))


@dataclass(slots=True)
class _Entry:
    found: "Rules | UnusablePageError | UnreachableError | None" = None
    until: float = 0.0
    """In the event loop's time. Who came before that believes it, however long he had to wait for it."""
    num_silent: int = 0
    """Times in succession that there was no answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Robots:
    """The robots.txt of all hosts, for a source's life. Belongs to one event loop."""

    def __init__(self, user_agent: str, threads: Threads) -> None:
        self._user_agent = user_agent
        self._threads = threads
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def check(self, url: str, fetcher: "Fetcher") -> Rules:
        """The rules of the host of `url`, if they allow it.

        :raises DisallowedError: they do not.
        :raises UnsafeUrlError: the host is at an address that is not allowed.
        :raises UnreachableError: it does not answer.
        :raises CostlyPageError: it answers too slowly.
        :raises OwnLimitError: the crawl that asks ends before it answers.
        """
        rules = await self.rules(url, fetcher)
        if not await rules.allows(url, self._threads):
            raise DisallowedError("robots.txt of its host does not allow it")
        return rules

    async def rules(self, url: str, fetcher: "Fetcher") -> Rules:
        """As `check`, of the host only."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        entry = self._entries.setdefault(origin, _Entry())
        self._entries.move_to_end(origin)
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        async with entry.lock:  # whoever has it fetches; if he is cancelled, the next one does
            if entry.found is None or came_at >= entry.until:
                entry.found = await self._fetch(origin, fetcher)
                is_silent = isinstance(entry.found, CostlyPageError | UnreachableError)
                entry.num_silent = entry.num_silent + 1 if is_silent else 0
                failed_s = 0.0 if entry.num_silent == 1 else FAILED_S
                entry.until = loop.time() + (FOUND_S if isinstance(entry.found, Rules) else failed_s)
                self._forget()
        found = entry.found
        if isinstance(found, Rules):
            return found
        if isinstance(found, UnreachableError):
            raise type(found)(str(found).replace(f"{origin}/robots.txt", url, 1))
        raise type(found)(str(found))

    async def _fetch(self, origin: str, fetcher: "Fetcher") -> "Rules | UnusablePageError | UnreachableError":
        """
        :raises UnsafeUrlError: it is at an address that is not allowed.
        :raises OwnLimitError: the crawl that asks ends before; that says nothing of the host, and is not remembered.
        """
        try:
            page = await fetcher.fetch(f"{origin}/robots.txt", lambda url: None, ROBOTS)
        except (UnsafeUrlError, OwnLimitError):
            raise
        except HttpStatusError as error:
            if 400 <= error.status < 500 and error.status != 429:
                return Rules()
            return _nothing_allowed(str(error))
        except CostlyPageError as error:
            return CostlyPageError(f"robots.txt of its host cannot be read: {error}")
        except NoConnectionError as error:
            return NoConnectionError(str(error))
        except UnreachableError as error:
            return UnreachableError(str(error))
        except TooManyRedirectsError:
            return Rules()
        except UnusablePageError as error:
            return _nothing_allowed(str(error))
        return await self._threads.run(partial(parse, page.body, self._user_agent))

    def _forget(self) -> None:
        def num_bytes(entry: _Entry) -> int:
            return 1024 + (entry.found.num_bytes if isinstance(entry.found, Rules) else 0)

        total = sum(map(num_bytes, self._entries.values()))
        for origin, entry in list(self._entries.items())[:-1]:
            if total <= MAX_BYTES:
                break
            if not entry.lock.locked():
                total -= num_bytes(self._entries.pop(origin))


def _nothing_allowed(why: str) -> DisallowedError:
    return DisallowedError(f"robots.txt of its host cannot be read ({why}), so nothing is allowed")


def parse(body: bytes, user_agent: str) -> Rules:
    """Call it in a thread: half a megabyte takes some tenths of a second."""
    from protego import Protego  # no part of a plain installation

    tokens = {token.lower() for token in TOKEN.findall(user_agent)}
    text = "\n".join(_for(tokens, body.decode(errors="replace").removeprefix("\ufeff")))
    parser = Protego.parse(text)
    rate = parser.request_rate(user_agent)
    rate_s = min(rate.seconds, MAX_DELAY_S) / min(rate.requests, MAX_DELAY_S) if rate else 0.0
    delay_s = max(parser.crawl_delay(user_agent) or 0.0, rate_s)
    sitemaps = tuple(dict.fromkeys(parser.sitemaps))[:MAX_SITEMAPS]
    num_bytes = 4 * len(text) + RULE_BYTES * (text.count("\n") + 1)
    return Rules(parser, user_agent, num_bytes, delay_s, sitemaps)


def _for(tokens: set[str], text: str) -> Iterator[str]:
    """The lines that matter for us, at most `MAX_RULES` beside those that name sitemaps.

    All robots but ours are under one name, and what is for them alone is left out: Protego takes time that is quadratic
    in the number of robots, and memory for each rule. Names are compared whole, as RFC 9309 has it.
    """
    was_nobody = False
    is_ours = in_names = False  # whether the group is ours, and whether its names are being read
    num_rules = num_sitemaps = 0
    for line in text.splitlines():
        line = line[:MAX_LINE_CHARS]
        agent = AGENT.match(line)
        if not agent:
            line = line.partition("#")[0].strip()
            if not line:
                continue
            if SITEMAP.match(line):
                num_sitemaps += 1
                if num_sitemaps <= MAX_SITEMAPS:
                    yield line
                continue
            was_nobody = False
            in_names = in_names and not RULE.match(line)
            num_rules += is_ours
            if is_ours and num_rules <= MAX_RULES:
                yield line
            continue
        name = agent[1].strip().lower().partition("/")[0]
        is_ours = (is_ours and in_names) or name == "*" or name in tokens
        in_names = True
        if name == "*" or name in tokens:
            was_nobody = False
            yield f"user-agent: {name}"
        elif not was_nobody:
            was_nobody = True
            yield NOBODY
