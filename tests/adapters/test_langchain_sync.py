"""LangChain: retrievers whose async method does not work although their sync one does."""

import threading
from typing import Any

import anyio
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import VectorStore

from streamrag import Update
from streamrag.adapters.langchain import StreamragChatModel, from_langchain, staged_retriever
from streamrag.core import Source
from streamrag.testing import ScriptedBackend

FOUND = [Document("The printer jams.", metadata={"source": "T-101"})]
OWN = ChatPromptTemplate.from_template("Answer from these documents:\n{context}\n\nQuestion: {question}")


class SyncStore(VectorStore):
    """A store that fails as `PGVector` of langchain_postgres 0.0.19 does by default, but does not tell beforehand."""

    def __init__(self) -> None:
        self.is_initialized = False
        self.num_awaited = 0
        self.threads: list[threading.Thread] = []

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        self.threads.append(threading.current_thread())
        return FOUND

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        self.num_awaited += 1
        if not self.is_initialized:
            self.is_initialized = True
            raise AssertionError("_async_engine not found")
        raise AssertionError("This method must be called with async_mode")

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Embeddings, **kwargs: Any) -> "SyncStore":  # type: ignore[override]
        raise NotImplementedError


class TellingStore(SyncStore):
    """A store that tells by an attribute, as `PGVector` does, that its async methods do not work."""

    async_mode = False


class Failing(SyncStore):
    """A store whose two methods raise these errors."""

    def __init__(self, awaited: Exception, called: Exception) -> None:
        super().__init__()
        self.awaited, self.called = awaited, called

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        self.threads.append(threading.current_thread())
        raise self.called

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        self.num_awaited += 1
        raise self.awaited


async def found(source: Source) -> list[list[str]]:
    with anyio.fail_after(120):
        updates = [event async for event in source.stream("Why?")]
    return [[chunk.uri for chunk in update.chunks] for update in updates if isinstance(update, Update)]


async def test_the_store_here_fails_as_the_real_one_does() -> None:
    retriever = SyncStore().as_retriever()
    assert retriever.invoke("Why?") == FOUND
    for message in ("_async_engine not found", "This method must be called with async_mode"):
        with pytest.raises(AssertionError, match=message):
            await retriever.ainvoke("Why?")


def ensemble(member: Any) -> Any:
    from langchain_classic.retrievers import EnsembleRetriever

    return EnsembleRetriever(retrievers=[member], weights=[1.0])


SOURCES = {
    "a vector store": from_langchain,
    "a retriever": lambda store: from_langchain(store.as_retriever()),
    "bound options": lambda store: from_langchain(store.as_retriever().with_config(tags=["x"])),
    "an ensemble": lambda store: from_langchain(ensemble(store.as_retriever())),
    "a stage": lambda store: from_langchain(staged_retriever(store)),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
async def test_a_store_whose_async_method_fails_is_awaited_once_then_called_in_threads(make: Any) -> None:
    store = SyncStore()
    source = make(store)
    first, second, third = [await found(source) for _ in range(3)]
    assert first == second == third
    assert first[-1] == ["T-101"]
    assert store.num_awaited == 1
    assert threading.current_thread() not in store.threads
    assert len(store.threads) == 3


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
async def test_a_store_that_says_it_is_not_async_is_never_awaited(make: Any) -> None:
    store = TellingStore()
    source = make(store)
    assert [(await found(source))[-1] for _ in range(2)] == [["T-101"]] * 2
    assert (store.num_awaited, len(store.threads)) == (0, 2)
    assert threading.current_thread() not in store.threads


async def test_a_store_in_async_mode_is_awaited() -> None:
    store = Failing(ConnectionError("awaited"), ConnectionError("called"))
    store.async_mode = True  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError, match="awaited"):
        await found(from_langchain(store))


async def test_a_function_that_makes_a_store_for_each_query_may_make_such_a_one() -> None:
    source = from_langchain(lambda query: SyncStore())
    assert [await found(source) for _ in range(2)] == [[["T-101"]], [["T-101"]]]


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError("This method must be called with async_mode")])
async def test_the_error_of_the_sync_method_is_raised(error: Exception) -> None:
    store = Failing(error, ConnectionError("the database is down"))
    with pytest.raises(ConnectionError, match="the database is down"):
        await found(from_langchain(store))


async def test_any_other_error_is_not_tried_again() -> None:
    store = Failing(ConnectionError("the database is down"), AssertionError("must not be called"))
    with pytest.raises(ConnectionError, match="the database is down"):
        await found(from_langchain(store))
    assert (store.num_awaited, store.threads) == (1, [])


async def test_a_failing_retriever_without_a_sync_method_raises_its_own_error() -> None:
    async def search(query: str) -> list[Document]:
        raise AssertionError("a defect of the search")

    for found_by in (RunnableLambda(search), Failing(AssertionError("a defect of the search"), NotImplementedError())):
        with pytest.raises(AssertionError, match="a defect of the search"):
            await found(from_langchain(found_by))


def test_the_chain_of_an_application_keeps_its_retriever() -> None:
    store = SyncStore()
    backend = ScriptedBackend("It jams [1].")
    with StreamragChatModel.from_retriever(store.as_retriever(), backend, OWN) as model:
        for _ in range(2):
            message = model.invoke("Why does the printer jam?")
            assert message.content == "It jams [1]."
            assert [citation["uri"] for citation in message.response_metadata["citations"]] == ["T-101"]
    assert store.num_awaited == 1
