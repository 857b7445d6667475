"""Validated options of a crawl."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from streamrag.support.validation import Count, CountOrZero, Seconds, Whole, validated

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
@dataclass(frozen=True, slots=True)
class CrawlOptions:
    """The options of `WebSource`, where they are documented."""

    max_depth: CountOrZero
    same_host: bool
    max_pages: Count
    max_pages_per_host: Count | None
    num_fetches: Count
    num_workers: Count
    page_timeout_s: Seconds
    crawl_timeout_s: Seconds
    max_body_bytes: Count
    max_crawl_bytes: Count
    max_page_chars: Count
    max_page_cpu_s: Seconds
    max_page_memory_bytes: Megabytes
    allow_private: bool
    obey_robots: bool
    sitemaps: bool
    send_traceparent: bool
    user_agent: Annotated[str, AfterValidator(_check_user_agent)]
    cdp_url: Annotated[str, AfterValidator(_check_cdp_url)] | None
    cache_folder: str | None
