"""Fixtures that more than one folder of tests uses."""

from pathlib import Path

import pytest

from streamrag.testing import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that every test shares; nobody writes into its folder."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
