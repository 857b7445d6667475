import gc
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from streamrag.errors import ConfigurationError, MissingDependencyError, ModelError
from streamrag_bench.measured_engine import running_engine

# When a client fails while it is made, vLLM closes its sockets but not their context.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")

PROGRAM = """
import asyncio
import logging
import sys
from streamrag_bench.measured_engine import running_engine

async def main(policy):
    async with running_engine(sys.argv[1], {"max_model_len": 512}, policy=policy, kv_tokens=4096) as client:
        await client.reset_prefix_cache()
        answer = [token async for token_ids in client.generate("q", range(3, 103), 4) for token in token_ids]
        print(len(answer), sum(step.num_tokens for step in client.steps), client.block_size)

if __name__ == "__main__":
    asyncio.run(main("fcfs"))
    print(logging.getLogger("vllm").handlers)
"""


async def test_without_vllm_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[vllm\]'"):
        async with running_engine(str(tmp_path), {}, policy=None):
            pass


async def test_a_folder_without_a_model_is_refused_before_an_engine_is_started(tmp_path: Path) -> None:
    for model, message in ((tmp_path, r"has no config\.json"), (tmp_path / "nowhere", "there is no model at")):
        with pytest.raises(ModelError, match=message):
            async with running_engine(str(model), {}, policy=None):
                pass


@pytest.mark.long
@pytest.mark.engine
def test_a_program_that_measures_an_engine_prints_only_what_it_prints_itself(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run([sys.executable, program, tiny_model], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["4 103 32", "[]"]
    assert run.returncode == 0


@pytest.mark.long  # as `test_start` shows it of a backend
@pytest.mark.engine
async def test_the_reason_of_an_engine_that_does_not_start_is_found_in_its_log(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)KV cache does not fit: .*512.*--kv-tokens"):
        async with running_engine(str(tiny_model), {"max_model_len": 512}, policy="fcfs", kv_tokens=256):
            pass
    gc.collect()  # what a failed start of vLLM leaves for the collector, and what that warns of
