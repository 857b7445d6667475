"""streamrag: stream retrieved context into a language model while it is still arriving.

    async with Pipeline(source=WebSource([url]), backend=VllmBackend(model)) as pipeline:
        async for chunk in pipeline.stream("How do I cancel a task group?"):
            print(chunk.text, end="")

These names are what a program needs to ask questions, to bring its own parts, and to catch errors. Each name loads its
module on first use, so that nothing heavy is imported before it is needed.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes
from streamrag.support.versions import __version__ as __version__

if TYPE_CHECKING:
    from streamrag.backends.lanes import DisaggregatedBackend as DisaggregatedBackend
    from streamrag.backends.openai import OpenAIBackend as OpenAIBackend
    from streamrag.backends.vllm import SchedulerOptions as SchedulerOptions
    from streamrag.backends.vllm import VllmBackend as VllmBackend
    from streamrag.backends.vllm.client.token_streams import TokenStream as TokenStream
    from streamrag.backends.vllm.client.token_streams import TokenStreams as TokenStreams
    from streamrag.core import AnswerChunk as AnswerChunk
    from streamrag.core import Append as Append
    from streamrag.core import Backend as Backend
    from streamrag.core import BackendEvent as BackendEvent
    from streamrag.core import Chunk as Chunk
    from streamrag.core import CutShort as CutShort
    from streamrag.core import Hint as Hint
    from streamrag.core import Mode as Mode
    from streamrag.core import ModelInfo as ModelInfo
    from streamrag.core import Prefilled as Prefilled
    from streamrag.core import Progress as Progress
    from streamrag.core import Prompt as Prompt
    from streamrag.core import SamplingParams as SamplingParams
    from streamrag.core import Skipped as Skipped
    from streamrag.core import Source as Source
    from streamrag.core import SourceEvent as SourceEvent
    from streamrag.core import Startable as Startable
    from streamrag.core import Tokenizer as Tokenizer
    from streamrag.core import Turn as Turn
    from streamrag.core import Update as Update
    from streamrag.core import plain_chat as plain_chat
    from streamrag.engine import RequestView as RequestView
    from streamrag.errors import AlreadyStartedError as AlreadyStartedError
    from streamrag.errors import BackendError as BackendError
    from streamrag.errors import ConfigurationError as ConfigurationError
    from streamrag.errors import DeadlineExceededError as DeadlineExceededError
    from streamrag.errors import EngineDeadError as EngineDeadError
    from streamrag.errors import IndexCorruptError as IndexCorruptError
    from streamrag.errors import IndexExistsError as IndexExistsError
    from streamrag.errors import IndexMismatchError as IndexMismatchError
    from streamrag.errors import IndexMissingError as IndexMissingError
    from streamrag.errors import MissingDependencyError as MissingDependencyError
    from streamrag.errors import ModelError as ModelError
    from streamrag.errors import PipelineClosedError as PipelineClosedError
    from streamrag.errors import PromptTooLongError as PromptTooLongError
    from streamrag.errors import ServerError as ServerError
    from streamrag.errors import SessionLogError as SessionLogError
    from streamrag.errors import SessionLogInUseError as SessionLogInUseError
    from streamrag.errors import SourceError as SourceError
    from streamrag.errors import StreamRagError as StreamRagError
    from streamrag.errors import TooManyQueriesError as TooManyQueriesError
    from streamrag.errors import TooManySessionsError as TooManySessionsError
    from streamrag.errors import TraceError as TraceError
    from streamrag.errors import UnreachableError as UnreachableError
    from streamrag.errors import UnsafeUrlError as UnsafeUrlError
    from streamrag.errors import UnsupportedVersionError as UnsupportedVersionError
    from streamrag.errors import VectorIndexError as VectorIndexError
    from streamrag.errors import WorkerError as WorkerError
    from streamrag.modes import AppendMode as AppendMode
    from streamrag.modes import PromptTemplate as PromptTemplate
    from streamrag.modes import UpdateMode as UpdateMode
    from streamrag.pipeline import Pipeline as Pipeline
    from streamrag.query.answer_stream import AnswerStream as AnswerStream
    from streamrag.query.answer_stream import EventStream as EventStream
    from streamrag.query.options import QueryOptions as QueryOptions
    from streamrag.sources.crawl.options import CrawlOptions as CrawlOptions
    from streamrag.sources.crawl.start_urls import search_engine as search_engine
    from streamrag.sources.crawl.web import WebSource as WebSource
    from streamrag.sources.generators import from_passages as from_passages
    from streamrag.sources.generators import from_rankings as from_rankings
    from streamrag.sources.hand_over.text_source import Rewrite as Rewrite
    from streamrag.sources.hand_over.text_source import from_tokens as from_tokens
    from streamrag.sources.index.build import build_index as build_index
    from streamrag.sources.index.changes import add_documents as add_documents
    from streamrag.sources.index.changes import remove_documents as remove_documents
    from streamrag.sources.index.generation import IndexSummary as IndexSummary
    from streamrag.sources.merged import MergedSource as MergedSource
    from streamrag.sources.postgres.build import TableSummary as TableSummary
    from streamrag.sources.postgres.build import build_table as build_table
    from streamrag.sources.postgres.source import PgVectorSource as PgVectorSource
    from streamrag.sources.retriever import RetrieverSource as RetrieverSource
    from streamrag.sources.search.delayed_updates import DelayedUpdates as DelayedUpdates
    from streamrag.sources.search.hybrid import HybridSource as HybridSource
    from streamrag.sources.search.vector import IvfSource as IvfSource
    from streamrag.sources.search.vector import VectorSource as VectorSource
    from streamrag.sources.search.vector import index_source as index_source
    from streamrag.telemetry import Answer as Answer
    from streamrag.trace.recorder import TraceRecorder as TraceRecorder
    from streamrag.trace.replay import ReplaySource as ReplaySource

_NAMES = {
    "streamrag.backends.lanes": "DisaggregatedBackend",
    "streamrag.backends.openai": "OpenAIBackend",
    "streamrag.backends.vllm": "SchedulerOptions VllmBackend",
    "streamrag.backends.vllm.client.token_streams": "TokenStream TokenStreams",
    "streamrag.core": (
        "AnswerChunk Append Backend BackendEvent Chunk CutShort Hint Mode ModelInfo Prefilled Progress Prompt "
        "SamplingParams Skipped Source SourceEvent Startable Tokenizer Turn Update plain_chat"
    ),
    "streamrag.engine": "RequestView",
    "streamrag.errors": (
        "AlreadyStartedError BackendError ConfigurationError DeadlineExceededError EngineDeadError IndexCorruptError "
        "IndexExistsError IndexMismatchError IndexMissingError MissingDependencyError ModelError PipelineClosedError "
        "PromptTooLongError ServerError SessionLogError SessionLogInUseError SourceError StreamRagError "
        "TooManyQueriesError TooManySessionsError TraceError UnreachableError UnsafeUrlError UnsupportedVersionError "
        "VectorIndexError WorkerError"
    ),
    "streamrag.modes": "AppendMode PromptTemplate UpdateMode",
    "streamrag.pipeline": "Pipeline",
    "streamrag.query.answer_stream": "AnswerStream EventStream",
    "streamrag.query.options": "QueryOptions",
    "streamrag.sources.crawl.options": "CrawlOptions",
    "streamrag.sources.crawl.start_urls": "search_engine",
    "streamrag.sources.crawl.web": "WebSource",
    "streamrag.sources.search.delayed_updates": "DelayedUpdates",
    "streamrag.sources.generators": "from_passages from_rankings",
    "streamrag.sources.hand_over.text_source": "Rewrite from_tokens",
    "streamrag.sources.index.build": "build_index",
    "streamrag.sources.index.changes": "add_documents remove_documents",
    "streamrag.sources.index.generation": "IndexSummary",
    "streamrag.sources.merged": "MergedSource",
    "streamrag.sources.postgres.build": "TableSummary build_table",
    "streamrag.sources.postgres.source": "PgVectorSource",
    "streamrag.sources.retriever": "RetrieverSource",
    "streamrag.sources.search.hybrid": "HybridSource",
    "streamrag.sources.search.vector": "IvfSource VectorSource index_source",
    "streamrag.telemetry": "Answer",
    "streamrag.trace.recorder": "TraceRecorder",
    "streamrag.trace.replay": "ReplaySource",
}
"""The public names of each module, which is imported when one of them is used."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_HOMES), "__version__"]

if not TYPE_CHECKING:  # a type checker that saw it would take any name
    __getattr__ = attributes(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
