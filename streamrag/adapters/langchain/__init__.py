"""Adapters for LangChain: sources and pipelines as LangChain components, and LangChain's retrievers as sources.

Needs the extra `langchain`.
"""

from streamrag.errors import MissingDependencyError, install_line

try:
    from streamrag.adapters.langchain.chat_model import StreamragChatModel
    from streamrag.adapters.langchain.retriever import StreamragRetriever
    from streamrag.adapters.langchain.source import from_langchain, staged_retriever
except ImportError as error:
    raise MissingDependencyError("langchain-core", install_line("langchain")) from error

__all__ = ["StreamragChatModel", "StreamragRetriever", "from_langchain", "staged_retriever"]
