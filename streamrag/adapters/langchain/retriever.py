"""A source as a LangChain retriever."""

import hashlib
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PositiveInt

from streamrag.adapters.portal import LoopPortal, PortalOwner
from streamrag.adapters.retrieved_chunks import retrieve
from streamrag.core import Append, Chunk, CutShort, Skipped, SourceEvent, Update
from streamrag.errors import ConfigurationError
from streamrag.modes.context import Context, UpdateMode


class StreamragRetriever(PortalOwner, BaseRetriever):
    """A source as a LangChain retriever, which returns the source's final context as documents.

    A document's metadata are `source`, `title`, `passage` and, if known, `score`; its `id` is a hash of its source and
    text. During retrieval, custom events are dispatched for `astream_events`: `streamrag_append` with a `document`,
    `streamrag_update` with the `documents` of the whole context, `streamrag_skipped` and `streamrag_cut_short` with a
    `reason`.

    With `async with`, the source runs in that event loop. Otherwise the first call, sync or async, starts it in a
    thread with its own loop, until `close()`, the end of a `with` block, or garbage collection of the retriever.
    Cancelling a call stops its retrieval.
    """

    source: Any
    """The source of the chunks."""
    k: PositiveInt | None = None
    """Maximum number of documents, by default all; `invoke(query, k=3)` overrides it for a call."""
    owns_source: bool = True
    """Whether the retriever starts and closes the source."""
    portal: Any = Field(default=None, exclude=True, repr=False)
    """The portal to the source's event loop; copies of the retriever share it."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.portal is None:
            self.portal = LoopPortal.to_source(self.source, is_owned=self.owns_source)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """Run the source, dispatch a custom event for each of its events; return the final documents, at most `k`."""
        found = _Found(self._num_wanted(k))
        config = {"callbacks": run_manager.get_child()}
        for event in self.portal.iterate(lambda: retrieve(self.source, query)):
            dispatch_custom_event(*found.custom_event(event), config=config)  # type: ignore[arg-type]
        return found.documents()

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """Return the documents as `_get_relevant_documents` does, without blocking the event loop."""
        found = _Found(self._num_wanted(k))
        config = {"callbacks": run_manager.get_child()}
        async with aclosing(self.portal.aiterate(lambda: retrieve(self.source, query))) as events:
            async for event in events:
                await adispatch_custom_event(*found.custom_event(event), config=config)  # type: ignore[arg-type]
        return found.documents()

    def _num_wanted(self, k: int | None) -> int | None:
        """Return the call's `k`, else the retriever's; raise ConfigurationError if it is below 1."""
        if k is not None and k < 1:
            raise ConfigurationError(f"k={k!r} must be at least 1")
        return k or self.k


class _Found:
    def __init__(self, num_wanted: int | None) -> None:
        self._chunks = Context()
        self._num_wanted = num_wanted

    def custom_event(self, event: SourceEvent) -> tuple[str, dict[str, Any]]:
        """Apply an event to the context; return a custom event's name, such as "streamrag_append", and its data."""
        if isinstance(event, Append | Update):
            self._chunks = self._chunks.with_chunks(UpdateMode().fold(self._chunks, event))
        match event:
            case Append(chunk):
                return "streamrag_append", {"document": document_of(chunk)}
            case Update():
                return "streamrag_update", {"documents": self.documents()}
            case Skipped(uri, reason):
                return "streamrag_skipped", {"source": uri, "reason": reason}
            case CutShort(reason):
                return "streamrag_cut_short", {"reason": reason}

    def documents(self) -> list[Document]:
        return [document_of(chunk) for chunk in self._chunks[: self._num_wanted]]


def document_of(chunk: Chunk) -> Document:
    """Return a document with `source`, `title`, `passage` and any `score` as metadata; its id hashes uri and text."""
    metadata = {"source": chunk.uri, "title": chunk.title, "passage": chunk.passage}
    if chunk.score is not None:
        metadata["score"] = chunk.score
    place = hashlib.sha256(f"{chunk.uri}\0{chunk.text}".encode(errors="surrogatepass"))
    return Document(chunk.text, id=place.hexdigest()[:32], metadata=metadata)
