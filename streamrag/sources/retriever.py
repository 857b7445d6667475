"""A retrieval function as a source."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from typing import Any

from streamrag.core import SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.sources.passage_reader import WANTED, PassageReader, describe_result, is_collection
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import call_for_list, name_of
from streamrag.support.messages import message_of

MAX_CALLS = 32  # concurrent calls; more queries wait, so that a hanging function cannot exhaust threads


class RetrieverSource:
    """A source that calls `retrieve(query)` once and yields the returned passages as one `Update`, in their order,
    behind a `Skipped` for each that has no text.

    `retrieve` may be async. Otherwise it runs in a thread, where cancelling the query cannot stop it; its result is
    then discarded. Each passage is a `str`, a `Chunk`, a pair (text, uri), a mapping with `text` and optionally `uri`,
    `title`, `passage` and `score`, or an object with `page_content` and such a mapping as `metadata`, like LangChain's
    documents; `source` and `url` are accepted for `uri`. A LangChain retriever becomes a source with
    `RetrieverSource(retriever.ainvoke)`.

    If `retrieve` returns a generator or another lazy iterable, at most 100,000 passages are read, and none after the
    query is stopped.

    The source's `name` is the function's name, which is also the uri of passages without one. Passages without a
    number are numbered within their document.

    :raises ConfigurationError: `retrieve` is not callable.
    """

    def __init__(self, retrieve: Callable[[str], Any]) -> None:
        if not callable(retrieve):
            raise ConfigurationError(f"RetrieverSource: {retrieve!r} cannot be called; give a function of the query")
        self._retrieve = retrieve
        self.name = name_of(retrieve)
        self._calls = Threads(MAX_CALLS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Call `retrieve` with `query`, and yield its passages as one `Update`.

        :raises SourceError: `retrieve` raised an error that is not streamrag's, or returned something other than
            passages.
        """
        try:
            passages = await call_for_list(self._retrieve, query, self._check, self._calls)
        except StreamRagError:
            raise
        except Exception as error:  # foreign code: any exception means a failed retrieval
            raise SourceError(f"{self.name} failed: {type(error).__name__}: {message_of(error)}") from error
        reader = PassageReader(self.name)
        for event in reader.skip_blank(Update(tuple(map(reader.chunk, passages)))):
            yield event

    def _check(self, result: Any) -> Iterable[Any]:
        """Return `result` if it may hold passages; raise SourceError for anything else."""
        if isinstance(result, AsyncIterable):
            raise SourceError(
                f"{self.name} returned an async iterator: streamrag.from_passages makes a source of such a function"
            )
        if not is_collection(result):
            raise SourceError(f"{self.name} returned {describe_result(result)}, not a list of {WANTED}")
        return result
