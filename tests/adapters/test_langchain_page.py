"""The programs that docs/langchain.md prints, as they are printed, against a server."""

import asyncio
import difflib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import streamrag
from streamrag import Append, Chunk
from streamrag.demo.tiny_llama import END, START
from streamrag.testing import ScriptedSource
from tests.backends.openai.openai_server import Request, Server, chunk, stream
from tests.backends.tools.tool_model import ToolBackend, call, make_tool_llama

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "langchain.md").read_text()
STAGED = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0].partition("documents = await")[0]
BEFORE, AFTER, TOOLS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
USAGE = {"prompt_tokens": 60, "completion_tokens": 5, "total_tokens": 65}


class Answers(list[Any]):
    """An answer to each request, of whichever endpoint."""

    def pop(self, index: Any = 0) -> Any:
        return answer


async def answer(request: Request) -> None:
    if request.path.endswith("/chat/completions"):
        message = {"role": "assistant", "content": "It jams."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "my-model", "choices": [choice]}
        await request.send_json({**body, "usage": USAGE})
    elif request.body.get("stream"):
        await stream(chunk("It "), chunk("jams.", "stop"), {"choices": [], "usage": USAGE}, "[DONE]")(request)
    else:
        await request.send_json({**chunk("x", "length"), "usage": {"prompt_tokens": 1}})


async def run(program: str, server: Server, folder: Path, model: Path) -> str:
    path = folder / "program.py"
    path.write_text(program.replace("http://localhost:8000", server.url).replace("./my-model", str(model)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def test_the_printed_change_adds_two_lines_besides_imports_and_keeps_the_prompt() -> None:
    changes = [line for line in difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines()) if line[0] in "+-" and line[2:]]
    added = [line for line in changes if line[0] == "+" and not re.match(r"\+ (from|import) ", line)]
    assert [line.partition("(")[0] for line in added] == [
        "+ backend = OpenAIBackend",
        "+ chain = StreamragChatModel.from_retriever",
    ]
    assert not any(line.startswith("- prompt") for line in changes)


@pytest.mark.parametrize("program", [BEFORE, AFTER], ids=["LangChain's own", "with streamrag"])
async def test_the_printed_programs_run_and_have_the_prompt_of_the_application(
    program: str, tmp_path: Path, tiny_model: Path
) -> None:
    async with Server() as server:
        server.models = {"data": [{"id": "my-model", "max_model_len": 1000}]}
        server.handlers = Answers()
        assert await run(STAGED + program, server, tmp_path, tiny_model) == "It jams.\n"
        body = server.requests[-1].body
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    assert "Answer from these documents:\n" in text
    assert "The printer jams on thick paper." in text
    assert "\n\nQuestion: Why does the printer jam?" in text
    if "prompt" in body:  # which streamrag sends in the model's chat template
        assert text.endswith(f"{END}\n{START}assistant\n")


def test_the_printed_program_with_tools_calls_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    backend = ToolBackend(make_tool_llama(tmp_path / "model"), lambda prompt, _: call("ticket_state", number="T-101"))
    monkeypatch.setattr(streamrag, "VllmBackend", lambda model: backend)
    exec(TOOLS, {"source": ScriptedSource([Append(Chunk("The printer jams.", "T-101"))])})
    assert "'name': 'ticket_state', 'args': {'number': 'T-101'}" in capsys.readouterr().out
