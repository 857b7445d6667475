"""The options of a crawl, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from streamrag.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CrawlOptions:
    """The options of `WebSource`, which explains them.

    :raises ConfigurationError: a value that cannot work.
    """

    max_depth: int
    same_host: bool
    max_pages: int
    max_pages_per_host: int | None
    num_fetches: int
    num_fetches_per_host: int
    num_workers: int
    page_timeout_s: float
    crawl_timeout_s: float
    max_body_bytes: int
    max_crawl_bytes: int
    max_page_chars: int
    max_page_cpu_s: float
    max_page_memory_bytes: int
    allow_private: bool
    obey_robots: bool
    sitemaps: bool
    send_traceparent: bool
    user_agent: str
    cdp_url: str | None
    cache_folder: str | None
    max_cache_bytes: int

    def __post_init__(self) -> None:
        least: Mapping[str, int] = {
            "max_depth": 0,
            "max_pages": 1,
            "max_pages_per_host": 1,
            "num_fetches": 1,
            "num_fetches_per_host": 1,
            "num_workers": 1,
            "max_body_bytes": 1,
            "max_crawl_bytes": 1,
            "max_page_chars": 1,
            "max_page_memory_bytes": 1 << 20,
            "max_cache_bytes": 1 << 20,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if name == "max_pages_per_host" and value is None:
                continue
            if type(value) is not int or value < minimum:
                raise ConfigurationError(f"WebSource: {name}={value!r} must be a whole number, at least {minimum}")
        for name in ("page_timeout_s", "crawl_timeout_s", "max_page_cpu_s"):
            seconds = getattr(self, name)
            if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"WebSource: {name}={seconds!r} must be a number of seconds over 0")
        if not re.fullmatch(r"[ -~]+", self.user_agent):
            raise ConfigurationError(f"WebSource: user_agent={self.user_agent!r} must be printable ASCII")
        if self.cdp_url is not None and not re.match(r"(http|ws)s?://[^/]", self.cdp_url):
            raise ConfigurationError(
                f"WebSource: cdp_url={self.cdp_url!r} must be the address of a browser's remote debugging port, "
                "such as http://127.0.0.1:9222"
            )
