"""An application of LangChain with two retrievers, which logs what `streamrag advise` needs.

pip install '.[langchain]'
python examples/langchain_log.py > langchain.jsonl && streamrag advise langchain.jsonl
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever


class RetrievalLog(BaseCallbackHandler):
    """Logs each question, the documents of each retriever, and the start of the answer, as JSON lines."""

    def __init__(self) -> None:
        self._queries: dict[Any, str] = {}  # for each run, the first run of its query; "" in a retriever
        self._retrievers: dict[Any, str] = {}  # for each retriever's run, the first run of its query

    def _log(self, event: str, query: str, **more: Any) -> None:
        line = json.dumps({"query": query, "event": event, "seconds": time.time(), **more})
        if query:
            print(line + "\n", end="", flush=True)  # one write keeps the lines of threads apart

    def on_chain_start(self, *_: Any, run_id: Any, parent_run_id: Any = None, **more: Any) -> None:
        self._queries[run_id] = self._queries.get(parent_run_id, str(run_id))
        if parent_run_id is None:
            self._log("question", str(run_id))

    on_tool_start = on_chain_start

    def on_retriever_start(self, *_: Any, run_id: Any, **more: Any) -> None:
        self.on_chain_start(run_id=run_id, **more)
        self._retrievers[run_id] = self._queries[run_id]
        self._queries[run_id] = ""  # a retriever returns what retrievers in it find

    def on_retriever_end(self, documents: Any, *, run_id: Any, **more: Any) -> None:
        tokens = [max(len(each.page_content) // 4, 1) for each in documents]
        self._log("chunks", self._retrievers[run_id], tokens=tokens)

    def on_chat_model_start(self, *_: Any, parent_run_id: Any = None, **more: Any) -> None:
        self._log("end", self._queries.get(parent_run_id, ""))


class Pieces(BaseRetriever):
    """Ranks pieces of this project's documentation by common words; a sleep is the slow database."""

    seconds: float

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        time.sleep(self.seconds * (0.5 + len(query) % 7 / 6))
        pages = [path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))]
        pieces = [page[i : i + 1_600] for page in pages for i in range(0, len(page), 1_600)]
        return [Document(piece) for piece in sorted(pieces, key=lambda p: -sum(map(p.count, query.split())))[:4]]


if __name__ == "__main__":
    prompt = ChatPromptTemplate.from_template("{keywords}\n{search}\nAnswer from these: {question}")
    sources = {"keywords": Pieces(seconds=0.2), "search": Pieces(seconds=1.0), "question": str}
    chain = sources | prompt | FakeListChatModel(responses=["See [1]."])
    for question in sys.argv[1:] or ["How do I record a trace?", "How do I crawl a page?"]:
        chain.invoke(question, config={"callbacks": [RetrievalLog()]})
