"""What adapters do with the chunks of a source takes no more time for each when there are many."""

import pytest

from streamrag import Append, Chunk
from streamrag.adapters.langchain import StreamragRetriever
from streamrag.adapters.retrieved_chunks import retrieve_all
from streamrag.core import Source
from streamrag.testing import ScriptedSource


class Compared(Chunk):
    """Counts how often any of them is compared."""

    num_times = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_times += 1
        return super().__eq__(other)

    __hash__ = Chunk.__hash__


async def as_documents(source: Source, query: str) -> list[object]:
    async with StreamragRetriever(source=source) as retriever:
        return [*await retriever.ainvoke(query)]


@pytest.mark.parametrize("retrieve", [retrieve_all, as_documents])
async def test_many_chunks_are_not_compared_each_with_each(retrieve: object) -> None:
    assert callable(retrieve)
    source = ScriptedSource([Append(Compared("text", f"{number}.md")) for number in range(1000)])
    Compared.num_times = 0
    assert len(await retrieve(source, "What?")) == 1000
    assert Compared.num_times < 10_000
