"""Numbers of tokens of a backend that counts characters itself: all interfaces have those of its server, or none."""

import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from streamrag.cli.output import Output
from streamrag.cli.top import render
from streamrag.core import AnswerChunk, BackendEvent, Prompt, SamplingParams, TokenUsage
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.logs import QueryLog, log_to
from streamrag.serve.observe.metrics import Metrics
from streamrag.testing import ScriptedBackend
from tests.serve.browsing import browsing, expect
from tests.serve.serving import CHUNKS, serving

BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
USAGE = TokenUsage(1_612, 58)


class TextBackend(ScriptedBackend):
    """A model behind a server that takes only text, and reports `usage`."""

    def __init__(self, usage: TokenUsage | None) -> None:
        super().__init__(answer="It is Paris [1].")
        self.model = replace(self.model, unit="characters")
        self._usage = usage

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            if isinstance(event, AnswerChunk):
                usage = self._usage if event.finish_reason else None
                yield replace(event, token_ids=(), usage=usage)


@pytest.fixture
def lines() -> Any:
    """What is logged, everything set back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    log_to(stream)
    yield stream
    root.handlers[:], root.level = before


@pytest.mark.parametrize("usage", [USAGE, None])
async def test_all_interfaces_have_the_same_numbers(
    usage: TokenUsage | None, lines: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(with_default_registry=False)
    observers = [Live(), QueryLog(), metrics]
    async with serving(CHUNKS, backend=TextBackend(usage), observers=observers) as served:
        chat = (await served.http.post("/v1/chat/completions", json=BODY)).json()["usage"]
        response = await served.http.post("/v1/responses", json={"input": "Why?", "model": "scripted"})
        values = (await served.http.get("/v1/live")).json()
    whole = usage or TokenUsage()
    counts = {"num_prompt_tokens": whole.num_prompt_tokens, "num_output_tokens": whole.num_output_tokens}
    assert (chat or {}).get("prompt_tokens") == (response.json()["usage"] or {}).get("input_tokens")
    assert (chat or {}).get("completion_tokens") == (response.json()["usage"] or {}).get("output_tokens")
    assert (chat or {}).get("prompt_tokens") == whole.num_prompt_tokens
    assert (chat or {}).get("total_tokens") == whole.num_tokens
    for ended in values["ended"]:
        assert {name: ended[name] for name in counts} == counts
    logged = [json.loads(line) for line in lines.getvalue().splitlines() if "queries" in json.loads(line)["logger"]]
    assert [{name: line.get(name) for name in counts} for line in logged] == [counts] * 2
    assert all("num_invalidated" not in line for line in logged), "that would be characters"
    total = metrics.registry.get_sample_value("streamrag:query_output_tokens_sum")
    assert total == 2 * (whole.num_output_tokens or 0)
    assert values["total"]["output_tokens"] == 2 * (whole.num_output_tokens or 0)
    assert values["total"]["uncounted"] == (0 if usage else 2)
    Output(width=120).print(render(values, width=120))
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "answered" in line and "chat" in line)
    assert row.split()[-3:] == (["1,612", "?", "58"] if usage else ["?", "?", "?"])
    assert ("2 answers of unknown length" in shown) == (usage is None)


@pytest.mark.parametrize("usage", [USAGE, None])
async def test_the_page_says_what_the_model_read_and_that_lengths_are_of_characters(usage: TokenUsage | None) -> None:
    backend = TextBackend(usage)
    async with serving(CHUNKS, backend=backend) as served, browsing(served.url) as seen:
        await seen.ask()
        await seen.answered("It is Paris [1].")
        num = len(backend.prompts[-1][-1].token_ids)
        await expect(seen.page.locator(".size")).to_contain_text(f"{num:,} characters")
        known = "The model read 1,612 tokens and wrote 58."
        unknown = "The model’s server does not say how many tokens it read and wrote."
        await expect(seen.page.locator(".overlap")).to_contain_text(known if usage else unknown)
        await expect(seen.page.locator(".t-first")).not_to_have_text("–")
