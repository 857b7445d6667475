"""A real browser that looks at a service, and what tests ask of it."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

QUESTION = "What is the capital of France?"


def expect(given: Any) -> Any:
    """Playwright's, which waits until it is so."""
    from playwright.async_api import expect

    return expect(given)


@dataclass
class Browsing:
    """A page on a service, and all that its browser said and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    """What stands in the console as an error, but for statuses and connections, which Chromium reports itself."""
    hosts: set[str] = field(default_factory=set)
    bodies: list[Any] = field(default_factory=list)
    """What was asked at /v1/ask."""

    async def ask(self, question: str = QUESTION) -> None:
        await self.page.get_by_label("Question", exact=True).fill(question)
        await self.page.get_by_role("button", name="Ask", exact=True).click()

    async def answered(self, text: str | None = None) -> None:
        """Wait until the newest turn has come to its end."""
        await expect(self.page.locator("#send")).to_have_text("Ask")
        if text is not None:
            await expect(self.page.locator(".turn").last.locator(".answer .text")).to_have_text(text)


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[Browsing]:
    """Chromium at the page of a service. Skips the test where there is none."""
    playwright = pytest.importorskip("playwright.async_api")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright.expect.set_options(timeout=20_000)  # on a machine that does much else besides
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = await browser.new_context(**{"reduced_motion": "reduce", **options})
            page = await context.new_page()
            seen = Browsing(page)

            def heard(message: Any) -> None:
                if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
                    seen.complaints.append(message.text)

            def asked(request: Any) -> None:
                seen.hosts.add(urlsplit(request.url).netloc)
                if request.url.endswith("/v1/ask"):
                    seen.bodies.append(request.post_data_json)

            page.on("console", heard)
            page.on("pageerror", lambda error: seen.complaints.append(str(error)))
            page.on("request", asked)
            await page.goto(url)
            yield seen
            assert seen.complaints == []
            assert seen.hosts == {urlsplit(url).netloc}
        finally:
            await browser.close()
