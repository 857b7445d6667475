"""The options of a crawl: the only place that has their names, types, defaults and meanings."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from streamrag.support.validation import Count, CountOrZero, Seconds, Whole, validated
from streamrag.support.versions import __version__

Megabytes = Annotated[Whole, Field(ge=1 << 20)]


def _check_user_agent(value: str) -> str:
    if not re.fullmatch(r"[ -~]+", value):
        raise ValueError("must be printable ASCII")
    return value


def _check_cdp_url(value: str) -> str:
    if not re.match(r"(http|ws)s?://[^/]", value):
        raise ValueError("must be the address of a browser's remote debugging port, such as http://127.0.0.1:9222")
    return value


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class CrawlOptions:
    """The bounds and manners of a crawl.

    max_depth: links to follow from a start URL; 0 for the start URLs only.
    same_host: follow only links to the hosts (and ports) of the start URLs and of their redirect targets.
    max_pages: pages to request in one crawl, usable or not.
    max_pages_per_host: pages to request from one host (and port).
    num_fetches: concurrent fetches of one crawl; at most 4 from one host, for all queries.
    num_workers: processes that clean pages, for all queries.
    page_timeout_s: seconds for fetching a page, and again for cleaning it.
    crawl_timeout_s: seconds after which a crawl ends with the pages it has.
    max_body_bytes: larger pages, before or after decompression, are skipped.
    max_crawl_bytes: bytes of all bodies of one crawl, before decompression.
    max_page_chars: characters of the relevant part of a page.
    max_page_cpu_s: CPU seconds for cleaning a page. A large page takes about one, and a page that is made to be slow is
        truncated before it takes more than two or three. Over the limit, its worker is replaced.
    max_page_memory_bytes: memory for cleaning a page, beyond the 0.2 GB of a worker (on Linux).
    allow_private: also fetch from loopback, private and other special addresses.
    obey_robots: fetch only pages that a host's robots.txt allows for `user_agent`, and respect its crawl delay. If the
        server fails to send it, no page of the host is fetched. With False, robots.txt is not requested, and you need
        the site's permission to fetch its pages at this rate.
    sitemaps: also look for pages in the sitemaps of the start URLs' hosts. Pages whose URL has words of the query are
        fetched before waiting links; half of `max_pages` is reserved until the sitemaps are read.
    send_traceparent: send the trace context of a traced query to the crawled sites, if they are your own and traced
        too. A browser does not send it.
    user_agent: the name in requests and for robots.txt.
    cdp_url: address of a running browser (`http://127.0.0.1:9222`), which then fetches pages and runs their scripts.
        The addresses of links and start URLs are checked beforehand, and the browser's redirects afterwards, but not
        the resources that a page loads: use a browser that cannot reach internal machines.
    cache_folder: a folder that caches pages, as HTTP's rules allow, and their cleaned content, for later queries and
        programs. Pages fetched by a browser are not cached. Beyond 256 MiB, the least recently used entries are
        evicted. By default there is no cache.

    :raises ConfigurationError: an invalid value.
    """

    max_depth: CountOrZero = 2
    same_host: bool = True
    max_pages: Count = 20
    max_pages_per_host: Count | None = None
    num_fetches: Count = 6
    num_workers: Count = 2
    page_timeout_s: Seconds = 10.0
    crawl_timeout_s: Seconds = 30.0
    max_body_bytes: Count = 4 << 20
    max_crawl_bytes: Count = 64 << 20
    max_page_chars: Count = 8000
    max_page_cpu_s: Seconds = 4.0
    max_page_memory_bytes: Megabytes = 512 << 20
    allow_private: bool = False
    obey_robots: bool = True
    sitemaps: bool = False
    send_traceparent: bool = False
    user_agent: Annotated[str, AfterValidator(_check_user_agent)] = f"streamrag/{__version__}"
    cdp_url: Annotated[str, AfterValidator(_check_cdp_url)] | None = None
    cache_folder: str | Path | None = None


def summary(option: str) -> str:
    """Return what the docstring of `CrawlOptions` says first on an option; "" where Python drops docstrings."""
    found = re.search(rf"^ *{option}: (.+?)[.;](?:\s|$)", CrawlOptions.__doc__ or "", re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else ""
