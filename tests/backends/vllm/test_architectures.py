"""Architectures of models on the real engine: streamed prompts beside fresh requests, at every generated position."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, make_model
from real_engine import GREEDY, MOST_DIFFERENCE, Load, differences, pairs, running_engine, tokens

from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.core import AnswerChunk, Prefilled, Prompt
from streamrag.errors import ConfigurationError

# A refused engine leaves a context of vLLM's client to the garbage collector.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")]

PAGE = Path(__file__).parents[3] / "docs" / "versions.md"
NUM_STREAMS = 16  # all at once, more than memory holds
IN_EACH_RUN = {"Gemma 3"}  # the others take minutes in all
WORKING = [name for name, each in ARCHITECTURES.items() if not (each.is_refused or each.why_untested)]
REFUSED = [name for name, each in ARCHITECTURES.items() if each.is_refused]
ONE_BLOCK = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}
"""For Mamba layers, blocks have 64 tokens: the page of a block must hold a state. On CPUs, Mamba 2 takes no longer step
with a prefix cache: vLLM has the kernel that keeps a state in the middle of a step for GPUs only."""


async def one_after_another(load: Load) -> None:
    """Replace the end of a prompt, twice; the second prompt begins like the first one.

    vLLM keeps the state of a Mamba layer at 320 tokens of 350: the first prompt goes back to it, the second one cannot.
    """
    beginning = tokens(random.Random(100), 300)
    for number, num_kept in ((100, 330), (101, 300)):
        rng = random.Random(number)
        prompt = beginning + tokens(rng, 50)
        async with load.streams.open(Prompt(tuple(prompt)), GREEDY) as stream:
            assert isinstance(await anext(stream), Prefilled)
            prompt = prompt[:num_kept] + tokens(rng, 30)
            await stream.update(Prompt(tuple(prompt), is_complete=True))
            answer = [pair async for event in stream if isinstance(event, AnswerChunk) for pair in pairs(event)]
            assert stream.record is not None
            load.records.append(stream.record)
        load.prompts[number], load.answers[number] = prompt, answer


async def check(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Compare streams that outgrow memory with fresh requests, and check that all that can happen to KV did."""
    architecture = ARCHITECTURES[name]
    if architecture.has_mamba:
        options = ONE_BLOCK | options
    if architecture.has_host_memory:
        options["kv_transfer_config"] = kv_transfer_config()
    scheduling = {"streamrag": {"eviction": "swap" if architecture.has_host_memory else "recompute"}}
    model = make_model(name, folder)
    async with running_engine(model, monkeypatch, **options, additional_config=scheduling) as engine:
        load = Load(TokenStreams(engine))
        await one_after_another(load)
        assert load.count("num_invalidated") > 0
        await load.run(NUM_STREAMS, at_once=NUM_STREAMS)
        assert load.count("num_from_cache") > 0 or architecture.has_mamba  # which states are kept is up to vLLM
        assert max(await differences(engine, load)) <= MOST_DIFFERENCE
    assert load.count("preemptions") > 0
    assert (load.count("num_loaded") > 0) == architecture.has_host_memory


@pytest.mark.parametrize("name", [n if n in IN_EACH_RUN else pytest.param(n, marks=pytest.mark.long) for n in WORKING])
async def test_streamed_answers_are_those_of_fresh_requests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check(name, tmp_path, monkeypatch)


@pytest.mark.long
async def test_two_workers_have_the_answers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism, each worker with a core and with host memory of its own."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two workers need two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    await check("Llama", tmp_path, monkeypatch, tensor_parallel_size=2, distributed_executor_backend="mp")


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
async def test_models_with_other_mamba_layers_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r'Mamba layers of the kind.*strategy="warming"'):
        async with running_engine(make_model(name, tmp_path), monkeypatch, max_num_batched_tokens=64):
            pass


@pytest.mark.long
async def test_steps_shorter_than_a_block_of_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r'Mamba layers together with steps.*strategy="warming"'):
        async with running_engine(make_model("Granite 4", tmp_path), monkeypatch, max_num_batched_tokens=32):
            pass


def test_the_page_has_each_architecture() -> None:
    section = PAGE.read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", section, re.MULTILINE))
    del rows["architecture"], rows["---"]
    assert rows.keys() == ARCHITECTURES.keys()
    for name, each in ARCHITECTURES.items():
        expected = "refused" if each.is_refused else "untested" if each.why_untested else "exact"
        assert rows[name].startswith(expected), name
