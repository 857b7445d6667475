"""Telling readers of data that were dropped."""

import asyncio

from streamrag.sessions.drops import DataDropped, Drops


async def test_drops_while_a_reader_handles_earlier_ones_are_reported_at_the_end() -> None:
    drops = Drops()
    reading = drops.read()
    first = anext(reading)
    told = []
    task = asyncio.create_task(first)
    await asyncio.sleep(0)
    drops.put(1, 1)
    told.append(await task)
    drops.put(2, 2)
    drops.end()
    told += [news async for news in reading]
    assert told == [DataDropped(1, 1, 1, 1), DataDropped(1, 2, 2, 2)]
