"""A function that finds passages, as a source."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from typing import Any

from streamrag.core import Chunk, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.sources.passage_reader import WANTED, PassageReader, describe_result
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import call_for_list, name_of
from streamrag.support.messages import message_of

MAX_CALLS = 32
"""Concurrent calls. Further queries wait: a retriever that hangs takes no threads but these."""


class RetrieverSource:
    """Asks `retrieve(query)` once, and yields what it returns as one `Update`, in its order.

    `retrieve` may be async; otherwise it runs in a thread, where cancelling the query cannot stop it, and its result is
    dropped. It returns passages, each of them a `str`, a `Chunk`, a pair (text, uri), a mapping with `text` and perhaps
    `uri`, `title`, `passage` and `score`, or an object with `page_content` and such a mapping as `metadata`, as
    LangChain's documents are; `source` and `url` are taken for `uri` too. A LangChain retriever becomes a source as
    `RetrieverSource(retriever.ainvoke)`.

    Of a generator, or what else makes them one by one, at most 100,000 passages are read, and none once the query is
    stopped.

    The source's `name` is the function's. Passages without a uri get it too; those without a number are counted within
    their document.

    :raises ConfigurationError: `retrieve` cannot be called.
    """

    def __init__(self, retrieve: Callable[[str], Any]) -> None:
        if not callable(retrieve):
            raise ConfigurationError(f"RetrieverSource: {retrieve!r} cannot be called; give a function of the query")
        self._retrieve = retrieve
        self.name = name_of(retrieve)
        self._calls = Threads(MAX_CALLS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Call `retrieve` with `query`, and yield its passages as one `Update`.

        :raises SourceError: `retrieve` raised, or returned something other than passages.
        """
        try:
            found = await call_for_list(self._retrieve, query, self._checked, self._calls)
        except StreamRagError:
            raise
        except Exception as error:  # anybody's code: whatever it raises is a failed retrieval
            raise SourceError(f"{self.name} failed: {type(error).__name__}: {message_of(error)}") from error
        passages = PassageReader(self.name)
        yield Update(tuple(map(passages.chunk, found)))

    def _checked(self, found: Any) -> Iterable[Any]:
        if isinstance(found, AsyncIterable):
            raise SourceError(
                f"{self.name} returned an async iterator: streamrag.from_passages makes a source of such a function"
            )
        if isinstance(found, str | bytes | Mapping | Chunk) or not isinstance(found, Iterable):
            raise SourceError(f"{self.name} returned {describe_result(found)}, not a list of {WANTED}")
        return found
