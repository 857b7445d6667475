"""Adapters for LangChain: sources and pipelines as LangChain components, and LangChain's retrievers as sources.

Needs the extra `langchain`, and `StreamragToolNode` also `pip install langgraph`.
"""

from typing import TYPE_CHECKING, Any

from streamrag.errors import MissingDependencyError, install_line

try:
    from streamrag.adapters.langchain.chat_model import StreamragChatModel
    from streamrag.adapters.langchain.retriever import StreamragRetriever
    from streamrag.adapters.langchain.source import from_langchain, staged_retriever
except ImportError as error:
    raise MissingDependencyError("langchain-core", install_line("langchain")) from error

if TYPE_CHECKING:
    from streamrag.adapters.langchain.tool_node import StreamragToolNode as StreamragToolNode
else:

    def __getattr__(name: str) -> Any:
        if name != "StreamragToolNode":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from streamrag.adapters.langchain.tool_node import StreamragToolNode
        except ImportError as error:
            raise MissingDependencyError("langgraph", "pip install langgraph") from error
        return StreamragToolNode


__all__ = ["StreamragChatModel", "StreamragRetriever", "StreamragToolNode", "from_langchain", "staged_retriever"]
