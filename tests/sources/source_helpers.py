"""What the tests of sources look at and wait for in other processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path


def alive(process_id: int) -> bool:
    """Whether this process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
    return state != "Z"


async def until(condition: Callable[[], object]) -> None:
    """Bounded wait for something that happens in another process, which cannot set an event of ours."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
