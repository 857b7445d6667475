"""What the tests of sources share: a check that nothing is left behind, and indexes."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one, worker processes included


@pytest.fixture
async def nothing_is_left_behind() -> AsyncIterator[None]:
    """Fails the test if it leaves a task, or (as a ResourceWarning, which is an error) a process, pipe or socket."""
    before = asyncio.all_tasks()
    gc.freeze()  # to look only at what the test makes is ten times quicker
    yield
    left = {task.get_name() for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    assert left == set()
    gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="session")
def toy_index(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Indexes by their number of documents; nobody changes them."""
    from toy_corpus import build_toy_index

    @cache
    def built(num_documents: int) -> Path:
        return build_toy_index(tmp_path_factory.mktemp(f"toy-{num_documents}"), num_documents)

    return built
