"""What the tests of sources share: indexes."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one, worker processes included


@pytest.fixture(scope="session")
def toy_index(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Indexes by their number of documents; nobody changes them."""
    from toy_corpus import build_toy_index

    @cache
    def built(num_documents: int) -> Path:
        return build_toy_index(tmp_path_factory.mktemp(f"toy-{num_documents}"), num_documents)

    return built
