"""Pages fetched by a running browser, which executes their scripts; used through crawl4ai inside a worker."""

import asyncio
import re
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

from crawl4ai import BrowserConfig, CacheMode, CrawlerRunConfig
from crawl4ai.async_crawler_strategy import AsyncPlaywrightCrawlerStrategy

from streamrag.errors import UnreachableError
from streamrag.sources.http.page import UnusablePageError

SETTLED = """js:() => {
    const now = performance.now(), size = document.body ? document.body.innerText.length : 0
    const last = window.streamrag ??= {size, begin: now, since: now}
    if (size !== last.size) { last.size = size; last.since = now }
    return now - last.begin > 3000 || (document.readyState === "complete" && size > 0 && now - last.since > 300)
}"""
"""A condition: scripts no longer change the text, or have had three seconds."""

NETWORK_ERROR = re.compile(r"net::ERR_(NAME|CONNECTION|ADDRESS|INTERNET|CERT|SSL|TIMED_OUT|TUNNEL|PROXY)\w*")
CAUSE = re.compile(r"net::\w+|Timeout \d+ms exceeded|(?<=Error: ).+")
"""The informative part of an error message of crawl4ai."""


class Browser:
    """The browser at `cdp_url`, used in a separate context without the user's sessions and tabs.

    :raises UnreachableError: nothing listens at `cdp_url`.
    """

    def __init__(self, cdp_url: str, *, user_agent: str, page_timeout_s: float) -> None:
        parts = urlsplit(cdp_url)
        port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
        try:  # crawl4ai would take seconds to notice that nothing listens
            socket.create_connection((parts.hostname, port), timeout=5).close()
        except OSError as error:
            raise UnreachableError(f"nothing listens at {cdp_url}: {error}") from None
        config = BrowserConfig(
            user_agent=user_agent,
            verbose=False,
            browser_mode="custom",
            cdp_url=cdp_url,
            cdp_cleanup_on_close=True,
            create_isolated_context=True,  # otherwise it uses the user's sessions, and any open tab
        )
        self._strategy = AsyncPlaywrightCrawlerStrategy(browser_config=config)
        self._config = CrawlerRunConfig(
            cache_mode=CacheMode.BYPASS, page_timeout=int(page_timeout_s * 1000), wait_for=SETTLED, verbose=False
        )
        self._runner = asyncio.Runner()
        self._runner.run(self._strategy.start())

    def fetch(self, url: str) -> tuple[str, str]:
        """Load `url`, and return the URL after redirects and the HTML. Ends this process if the browser is gone.

        :raises UnreachableError: the page cannot be reached.
        :raises UnusablePageError: the response has an error status.
        :raises ValueError: the browser failed to load it.
        """
        try:
            response = self._runner.run(self._strategy.crawl(url, config=self._config))
        except Exception as error:
            raise self._translate(error) from error
        if (response.status_code or 200) >= 400:
            raise UnusablePageError(f"the server answers HTTP {response.status_code}")
        return response.redirected_url or url, response.html

    def _translate(self, error: Exception) -> Exception:
        """Return UnreachableError for a network error, else ValueError; end this process if the browser is gone."""
        browser: Any = self._strategy.browser_manager.browser
        if browser and not browser.is_connected():
            sys.exit("the browser has gone away")  # ends this worker; the next one connects again
        message = str(error)
        if network := NETWORK_ERROR.search(message):
            return UnreachableError(network[0])
        cause = CAUSE.search(message)
        return ValueError(cause[0][:200] if cause else message[:200])
