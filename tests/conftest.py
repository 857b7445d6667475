"""What more than one folder of tests uses."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from streamrag.testing import make_tiny_llama

# How long an example takes depends on what else the machine does.
settings.register_profile("streamrag", deadline=None)
settings.load_profile("streamrag")

# The threads of vLLM's CPU backend spin while they wait for each other, each bound to a core. With models as small as
# these, several take six times the CPU time of one. Read when torch is imported, here and in processes started here.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs all tests with an engine: two at a time would be slow and take too much memory."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("engine"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that every test shares; nobody writes into its folder."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
