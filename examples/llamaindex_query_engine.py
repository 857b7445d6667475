"""A LlamaIndex application with one line changed: the query engine. Retrievers that it fuses are used as they answer.

    python examples/llamaindex_query_engine.py [URL MODEL]

URL is that of an OpenAI-compatible server, with /v1. Without one, a scripted backend says always the same.
"""

import sys

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from streamrag import OpenAIBackend, Pipeline
from streamrag.adapters.llamaindex import LlamaIndexSource, StreamragQueryEngine
from streamrag.testing import ScriptedBackend

NODES = [
    TextNode(text="Cancelling a scope cancels every task in it."),
    TextNode(text="An event wakes every task that waits for it."),
]


class ByWords(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = {*query_bundle.query_str.lower().strip("?").split()}
        found = [NodeWithScore(node=node, score=len(words & {*node.text.lower().split()})) for node in NODES]
        return sorted(found, key=lambda each: -each.get_score())


retriever = QueryFusionRetriever([ByWords(), ByWords()], llm=MockLLM(), num_queries=1)
backend = OpenAIBackend(sys.argv[1], model=sys.argv[2]) if sys.argv[1:] else ScriptedBackend("A scope does.")
# Before: RetrieverQueryEngine.from_args(retriever, streaming=True)
with StreamragQueryEngine(Pipeline(LlamaIndexSource(retriever), backend), streaming=True) as query_engine:
    response = query_engine.query("What cancels every task?")
    response.print_response_stream()  # type: ignore[union-attr]
    print("\n" + response.get_formatted_sources())
