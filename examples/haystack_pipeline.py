"""A Haystack pipeline in which one component, streamrag, retrieves, builds the prompt and generates.

    python examples/haystack_pipeline.py [URL MODEL]

URL is that of an OpenAI-compatible server, with /v1. Without one, a scripted backend says always the same.
"""

import sys

import haystack
from haystack.components.builders import AnswerBuilder
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from streamrag import OpenAIBackend, Pipeline
from streamrag.adapters.haystack import HaystackSource, StreamragGenerator
from streamrag.testing import ScriptedBackend

store = InMemoryDocumentStore()
store.write_documents(
    [
        haystack.Document(content="Cancelling a scope cancels every task in it.", meta={"title": "Scopes"}),
        haystack.Document(content="An event wakes every task that waits for it.", meta={"title": "Events"}),
    ]
)
backend = OpenAIBackend(sys.argv[1], model=sys.argv[2]) if sys.argv[1:] else ScriptedBackend("A scope does.")
source = HaystackSource(InMemoryBM25Retriever(store), inputs={"top_k": 1})

pipeline = haystack.Pipeline()
pipeline.add_component("rag", StreamragGenerator(Pipeline(source, backend)))
pipeline.add_component("answers", AnswerBuilder())
pipeline.connect("rag.replies", "answers.replies")
pipeline.connect("rag.documents", "answers.documents")
question = "What cancels every task?"
asked = {"query": question, "streaming_callback": lambda chunk: print(chunk.content, end="", flush=True)}
[answer] = pipeline.run({"rag": asked, "answers": {"query": question}})["answers"]["answers"]
print("\nfrom:", *(document.meta["title"] for document in answer.documents))
pipeline.close()
