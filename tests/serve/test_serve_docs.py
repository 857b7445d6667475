"""The pages of docs/ about streams and sessions: what they say is so."""

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
