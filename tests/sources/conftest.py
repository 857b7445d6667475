"""What the tests of sources share: a check that nothing is left behind."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
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
