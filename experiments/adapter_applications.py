"""The applications that `adapters.py` asks: each as the users of a framework write it, and with streamrag in it.

All write the same words around what they have found. Each is a function from a question to the texts of the answer, as
they come. Those that have a prompt of their own leave its messages in `asked`, to be compared with streamrag's.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import haystack
import openai
from adapter_site import Page, Search, Site
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers import MultiRetriever
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from llama_index.core import PromptTemplate as LlamaIndexTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage as LlamaIndexMessage
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from streamrag import Backend, MergedSource, Mode, Pipeline, PromptTemplate, SamplingParams
from streamrag.adapters.haystack import HaystackSource, StreamragGenerator
from streamrag.adapters.langchain import StreamragChatModel, from_langchain
from streamrag.adapters.llamaindex import LlamaIndexSource, StreamragQueryEngine

INSTRUCTION = "Answer the question from these documents."
TEMPLATE = PromptTemplate(
    system="",
    before_context=INSTRUCTION,
    passage="\n\n{text}",  # so that tokenizers cut where a part of streamrag's prompt ends
    after_context="\n\nQuestion: {question}",
)
MODEL = "tiny"
MAX_TOKENS = 8
NUM_LOCAL = 3
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

Ask: TypeAlias = Callable[[str], AsyncIterator[str]]
Application: TypeAlias = Callable[[Backend], AbstractAsyncContextManager[Ask]]
asked: list[list[dict[str, str]]] = []
"""The messages of each prompt that a framework made itself."""


# ----------------------------------------------------------------- LangChain: a loader of pages, a prompt, a chat model


class PageLoader(BaseLoader):
    """The pages of the site about a question."""

    def __init__(self, site: Site, question: str) -> None:
        self._site = site
        self._question = question

    async def alazy_load(self) -> AsyncGenerator[Document, None]:
        async for page in self._site.load(self._question):
            yield Document(page.text, metadata={"source": page.name, "title": page.title})


def langchain_chain(site: Site, url: str) -> Ask:
    """LangChain's own."""

    async def load(question: str) -> list[Document]:
        return await PageLoader(site, question).aload()

    def as_text(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    def keep(prompt: PromptValue) -> PromptValue:
        asked.append([{"role": "user", "content": str(message.content)} for message in prompt.to_messages()])
        return prompt

    prompt = ChatPromptTemplate.from_template(f"{INSTRUCTION}\n\n{{context}}\n\nQuestion: {{question}}")
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        extra_body={"ignore_eos": True},
    )
    context = RunnableLambda(load) | as_text
    found = {"context": context, "question": RunnablePassthrough()}
    chain = found | prompt | RunnableLambda(keep) | model | StrOutputParser()
    return lambda question: chain.astream(question)


def langchain_with_streamrag(site: Site, *, overlap: bool = True) -> Application:
    """The same with streamrag."""

    @asynccontextmanager
    async def application(backend: Backend) -> AsyncIterator[Ask]:
        source = from_langchain(lambda question: PageLoader(site, question))
        pipeline = Pipeline(source, backend, template=TEMPLATE, owns_backend=False, overlap=overlap)
        async with StreamragChatModel(pipeline=pipeline) as model:
            chain = model.bind(params=SAMPLING) | StrOutputParser()
            yield lambda question: chain.astream(question)

    return application


# ------------------------------------------------------- LlamaIndex: two retrievers, their fusion, and a query engine


class NotesRetriever(BaseRetriever):
    """Of what is in memory."""

    def __init__(self, search: Search) -> None:
        super().__init__()
        self._search = search

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _nodes(self._search.best(query_bundle.query_str, NUM_LOCAL))


class SiteRetriever(BaseRetriever):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise NotImplementedError("async only")

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _nodes([page async for page in self._site.load(query_bundle.query_str)])


def _nodes(pages: Sequence[Page]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=page.text), score=1 / rank) for rank, page in enumerate(pages, 1)]


def llamaindex_retriever(notes: Search, site: Site) -> QueryFusionRetriever:
    return QueryFusionRetriever(
        [NotesRetriever(notes), SiteRetriever(site)],
        mode="reciprocal_rerank",  # type: ignore[arg-type]
        num_queries=1,
        similarity_top_k=100,
        llm=MockLLM(),
    )


class ServerLLM(CustomLLM):
    """The model behind a server: LlamaIndex's own needs an older OpenAI client than is installed here."""

    url: str

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=8_192, num_output=MAX_TOKENS, is_chat_model=True, model_name=MODEL)

    async def astream_chat(self, messages: Sequence[LlamaIndexMessage], **kwargs: Any) -> Any:
        said = [{"role": message.role.value, "content": message.content or ""} for message in messages]
        asked.append(said)
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none")

        async def responses() -> AsyncGenerator[ChatResponse, None]:
            async with client:
                parts: Any = await client.chat.completions.create(
                    model=MODEL,
                    messages=said,  # type: ignore[arg-type]
                    stream=True,
                    temperature=0,
                    max_completion_tokens=MAX_TOKENS,
                    extra_body={"ignore_eos": True},
                )
                async for part in parts:
                    delta = part.choices[0].delta.content or ""
                    yield ChatResponse(message=LlamaIndexMessage("", role=MessageRole.ASSISTANT), delta=delta)

        return responses()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise NotImplementedError("only chats")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError("only chats")


def llamaindex_engine(retriever: QueryFusionRetriever, url: str) -> Ask:
    """LlamaIndex's own."""
    template = LlamaIndexTemplate(f"{INSTRUCTION}\n\n{{context_str}}\n\nQuestion: {{query_str}}")
    return _asked_of(
        RetrieverQueryEngine.from_args(
            retriever, llm=ServerLLM(url=url), text_qa_template=template, streaming=True, use_async=True
        )
    )


def llamaindex_with_streamrag(retriever: QueryFusionRetriever, mode: Mode | None = None) -> Application:
    """The same with streamrag."""

    @asynccontextmanager
    async def application(backend: Backend) -> AsyncIterator[Ask]:
        source = LlamaIndexSource(retriever)
        async with Pipeline(
            source, backend, mode=mode, template=TEMPLATE, owns_backend=False, overlap=True
        ) as pipeline:
            yield _asked_of(StreamragQueryEngine(pipeline, streaming=True, params=SAMPLING))

    return application


def _asked_of(engine: Any) -> Ask:
    async def ask(question: str) -> AsyncGenerator[str, None]:
        response = await engine.aquery(question)
        async for text in response.async_response_gen():
            yield text

    return ask


# ------------------------------------------------------- Haystack: two retrievers, a prompt builder, and a generator


@haystack.component
class SitePages:
    """A retriever of the site's pages."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @haystack.component.output_types(documents=list[haystack.Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[haystack.Document]]:
        raise NotImplementedError("async only")

    @haystack.component.output_types(documents=list[haystack.Document])
    async def run_async(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[haystack.Document]]:
        return {"documents": [haystack.Document(content=page.text) async for page in self._site.load(query)]}


def haystack_retriever(notes: Sequence[Page], site: Site) -> MultiRetriever:
    store = InMemoryDocumentStore()
    store.write_documents([haystack.Document(content=page.text) for page in notes])
    retrievers: dict[str, Any] = {"notes": InMemoryBM25Retriever(store, top_k=NUM_LOCAL), "site": SitePages(site)}
    return MultiRetriever(retrievers=retrievers)


def haystack_pipeline(retriever: MultiRetriever, url: str) -> Ask:
    """Haystack's own."""
    words = "{% for document in documents %}\n\n{{ document.content }}{% endfor %}\n\nQuestion: {{ query }}"
    pipeline = haystack.Pipeline()
    pipeline.add_component("retriever", retriever)
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user(INSTRUCTION + words)]))
    pipeline.add_component(
        "llm",
        OpenAIChatGenerator(
            api_base_url=f"{url}/v1",
            api_key=Secret.from_token("none"),
            model=MODEL,
            generation_kwargs={
                "temperature": 0,
                "max_completion_tokens": MAX_TOKENS,
                "extra_body": {"ignore_eos": True},
            },
        ),
    )
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "llm.messages")

    async def ask(question: str) -> AsyncGenerator[str, None]:
        given = {"retriever": {"query": question}, "prompt": {"query": question}}
        handle = pipeline.stream(given, include_outputs_from={"prompt"})
        async for part in handle:
            yield part.content
        [message] = handle.result["prompt"]["prompt"]
        asked.append([{"role": "user", "content": message.text}])

    return ask


def haystack_with_streamrag(retriever: MultiRetriever) -> Application:
    """The same with streamrag, which fuses the members' results by Haystack's formula."""

    @asynccontextmanager
    async def application(backend: Backend) -> AsyncIterator[Ask]:
        source = MergedSource(*map(HaystackSource, retriever.retrievers.values()))
        async with Pipeline(source, backend, template=TEMPLATE, owns_backend=False, overlap=True) as inner:
            pipeline = haystack.Pipeline()
            pipeline.add_component("llm", StreamragGenerator(inner, params=SAMPLING))

            async def ask(question: str) -> AsyncGenerator[str, None]:
                async for part in pipeline.stream({"llm": {"query": question}}):
                    yield part.content

            yield ask

    return application
