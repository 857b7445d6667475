"""Architectures of models on the real engine: streamed prompts beside fresh requests, at every generated position."""

import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, make_model
from real_engine import MOST_DIFFERENCE, Load, differences, running_engine

from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.errors import ConfigurationError

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[3] / "docs" / "versions.md"
NUM_STREAMS, WITHIN_S = 12, 2.0  # more than memory holds
IN_EACH_RUN = {"Mixtral", "Gemma 3"}
"""The others take minutes in all: `make models`."""
WORKING = [name for name, each in ARCHITECTURES.items() if not (each.has_mamba or each.why_untested)]


@pytest.mark.parametrize("name", [n if n in IN_EACH_RUN else pytest.param(n, marks=pytest.mark.long) for n in WORKING])
async def test_streamed_answers_are_those_of_fresh_requests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = ARCHITECTURES[name]
    options = {"kv_transfer_config": kv_transfer_config()} if architecture.has_host_memory else {}
    scheduling = {"streamrag": {"eviction": "swap" if architecture.has_host_memory else "recompute"}}
    model = make_model(name, tmp_path)
    async with running_engine(model, monkeypatch, **options, additional_config=scheduling) as engine:
        load = Load(TokenStreams(engine))
        await load.run(NUM_STREAMS, WITHIN_S)
        assert max(await differences(engine, load)) <= MOST_DIFFERENCE
    assert load.count("preemptions") > 0
    assert load.count("num_invalidated") > 0
    assert load.count("num_from_cache") > 0
    assert (load.count("num_loaded") > 0) == architecture.has_host_memory


@pytest.mark.parametrize("name", ["Jamba"])
async def test_models_with_mamba_layers_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r'a model with Mamba layers.*strategy="warming"'):
        async with running_engine(make_model(name, tmp_path), monkeypatch):
            pass


def test_the_page_has_each_architecture() -> None:
    section = PAGE.read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", section, re.MULTILINE))
    del rows["architecture"], rows["---"]
    assert rows.keys() == ARCHITECTURES.keys()
    for name, each in ARCHITECTURES.items():
        expected = "refused" if each.has_mamba else "untested" if each.why_untested else "exact"
        assert rows[name].startswith(expected), name
