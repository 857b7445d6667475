"""The examples of docs/serve-openai.md."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.tools.tool_model import ToolBackend, call, make_tool_llama
from tests.serve.serving import PARIS, ROME, serving

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serve-openai.md"
ASKING, TOOLS, BRINGING = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


async def test_a_question_and_its_citations(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        names = {"url": f"{served.url}/v1", "model": "scripted"}
        await asyncio.to_thread(exec, ASKING, names)
    assert capsys.readouterr().out.splitlines() == ["It is Paris [1].", f"{PARIS.title} {PARIS.uri}"]


async def test_an_agent_calls_its_tool_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    from streamrag.backends.tools.parser import ToolCallParser

    def script(prompt: str, params: object) -> str:
        return "You may [1]." if "It snows in Paris." in prompt else call("get_weather", city="Paris")

    backend = ToolBackend(make_tool_llama(tmp_path / "model"), script)
    async with serving(backend=backend, tool_parser=ToolCallParser("hermes")) as served:
        await asyncio.to_thread(exec, TOOLS, {"url": f"{served.url}/v1", "model": "scripted"})
    assert capsys.readouterr().out == "You may [1].\n"
    assert len(backend.texts) == 2


async def test_texts_are_brought_while_they_arrive() -> None:
    async def texts() -> AsyncIterator[str]:
        for chunk in (PARIS, ROME):
            yield chunk.text

    names: dict[str, Any] = {}
    exec(BRINGING, names)
    async with serving() as served:
        assert await names["ask"](f"{served.url}/v1", "Which is it?", texts()) == "It is Paris [1]."
        last = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
    assert last == f"User: {PARIS.text}\n\nUser: {ROME.text}\n\nUser: Which is it?\n\nAssistant:"
