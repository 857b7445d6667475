"""A search engine's answers as start addresses."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from website import Reply, Website

from streamrag import search_engine
from streamrag.errors import ConfigurationError, SourceError, UnsafeUrlError

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Engine(Website):
    """A SearXNG of which only the answer is real."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = Reply()

    def answers(self, body: Any, **reply: Any) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body)
        self.answer = Reply(text, content_type="application/json", **reply)

    async def _notify(self) -> None:
        if self.requests:
            self.pages[self.requests[-1].path] = self.answer
        await super()._notify()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine().running() as engine:
        assert isinstance(engine, Engine)
        yield engine
    for _ in range(5):  # httpx leaves its generators to the event loop, which ends them in its next steps
        await asyncio.sleep(0)


async def test_the_first_results_are_the_addresses(engine: Engine) -> None:
    found = [{"url": f"http://{i % 4}.example/"} for i in range(9)]
    engine.answers({"results": [*found[:2], {"url": None}, *found]})
    find = search_engine(engine.url(), num_results=3)
    assert await find("Why & how?\ud800") == ["http://0.example/", "http://1.example/", "http://2.example/"]
    asked = urlsplit(engine.paths[0])
    assert (asked.path, parse_qs(asked.query)) == ("/search", {"q": ["Why & how??"], "format": ["json"]})


@pytest.mark.parametrize(
    ("body", "reply", "message"),
    [
        ({}, {"status": 403}, "answers HTTP 403; is json among search.formats"),
        ({}, {"status": 302, "headers": {"Location": "http://169.254.169.254/"}}, "answers HTTP 302"),
        ({}, {}, "does not answer as SearXNG does"),
        ([], {}, "does not answer as SearXNG does"),
        ({"results": [1]}, {}, "does not answer as SearXNG does"),
        (b"<html>", {}, "does not answer as SearXNG does"),
        (b"[" * 100_000, {}, "does not answer as SearXNG does"),
        (b" " * (1 << 20), {}, "answers more than 524288 bytes"),
        ({"results": []}, {"fault": "breaks off"}, "cannot be reached: "),
        ({}, {"fault": "silent"}, r"did not answer within 0\.5 s"),
    ],
)
async def test_a_wrong_answer_of_a_search_engine_is_an_error_that_names_it(
    engine: Engine, body: Any, reply: Any, message: str
) -> None:
    engine.answers(body, **reply)
    with pytest.raises(SourceError, match=message):
        await search_engine(engine.url(), timeout_s=0.5 if reply.get("fault") == "silent" else 10)("Why?")


async def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(SourceError, match=r"the search engine at http://127\.0\.0\.9:9/ cannot be reached: "):
        await search_engine("http://127.0.0.9:9")("Why?")


def test_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(UnsafeUrlError):
        search_engine("file:///etc/passwd")
    for options in ({"num_results": 0}, {"timeout_s": 0}, {"timeout_s": float("inf")}):
        with pytest.raises(ConfigurationError):
            search_engine("http://127.0.0.1:8888", **options)  # type: ignore[arg-type]
