"""The pages of docs/ about streams and faults: what they say is so."""

import ast
import asyncio
import os
import re
import sys
from pathlib import Path

from tests.serve.serving import serving

ROOT = Path(__file__).resolve().parents[2]


async def test_the_examples_with_curl_work() -> None:
    page = (ROOT / "docs" / "serve-streams.md").read_text()
    examples = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    async with serving() as served:
        for example in examples:
            command = example.replace("http://127.0.0.1:8080", served.url).replace("curl ", "curl -s ", 1)
            shell = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
            said, _ = await shell.communicate()
            assert shell.returncode == 0
            assert b"event: answered" in said
            assert b"It is Paris [1]." in said


async def test_the_example_of_a_sessions_socket_works() -> None:
    page = (ROOT / "docs" / "serve-sessions.md").read_text()
    (example,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    async with serving() as served:
        shell = await asyncio.create_subprocess_shell(
            example.replace("http://127.0.0.1:8080", served.url),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        said, _ = await shell.communicate()
    assert shell.returncode == 0
    assert b"appended 3" in said
    for id in (b"a", b"b"):
        assert re.search(id + rb" [23] It is Paris \[1\]\.\n", said), said


def test_every_test_in_the_table_of_faults_exists() -> None:
    pages = [(ROOT / "docs" / f"serve-{name}.md").read_text() for name in ("faults", "attacks")]
    named = set(re.findall(r"`(test_\w+)`", "".join(pages)))
    folders = [ROOT / "tests" / name for name in ("serve", "serve/responses", "sessions")]
    trees = [ast.parse(path.read_text()) for folder in folders for path in folder.glob("test_*.py")]
    there = {
        each.name
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(named) > 30
    assert named - there == set()
    tables = [page.partition(end)[0] for page, end in zip(pages, ("## Measured", "## What an attack"), strict=True)]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| ")]
    for row in [row for row in rows if not row.startswith("| what happens |")]:
        assert "`test_" in row, f"a fault without a test: {row}"
