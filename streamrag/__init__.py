"""streamrag: stream retrieved context into a language model while it is still arriving.

    async with Pipeline(source=WebSource([url]), backend=VllmBackend(model)) as pipeline:
        async for chunk in pipeline.stream("How do I cancel a task group?"):
            print(chunk.text, end="")

Nothing heavy is imported before it is used: each public name loads its own module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamrag.versions import __version__ as __version__

if TYPE_CHECKING:
    from streamrag.backends.openai import OpenAIBackend as OpenAIBackend
    from streamrag.backends.vllm import VllmBackend as VllmBackend
    from streamrag.backends.vllm.client.token_streams import StreamedTokens as StreamedTokens
    from streamrag.backends.vllm.client.token_streams import TokenStream as TokenStream
    from streamrag.backends.vllm.client.token_streams import TokenStreams as TokenStreams
    from streamrag.core import AnswerChunk as AnswerChunk
    from streamrag.core import Append as Append
    from streamrag.core import Chunk as Chunk
    from streamrag.core import CutShort as CutShort
    from streamrag.core import Hint as Hint
    from streamrag.core import Prompt as Prompt
    from streamrag.core import SamplingParams as SamplingParams
    from streamrag.core import Skipped as Skipped
    from streamrag.core import Turn as Turn
    from streamrag.core import Update as Update
    from streamrag.errors import StreamRagError as StreamRagError
    from streamrag.modes import AppendMode as AppendMode
    from streamrag.modes import PromptTemplate as PromptTemplate
    from streamrag.modes import UpdateMode as UpdateMode
    from streamrag.pipeline import Pipeline as Pipeline
    from streamrag.sources.retriever import RetrieverSource as RetrieverSource
    from streamrag.sources.stretch import StretchedSource as StretchedSource
    from streamrag.sources.vector import VectorSource as VectorSource
    from streamrag.sources.web import WebSource as WebSource
    from streamrag.telemetry import Answer as Answer

_HOMES = {
    "Answer": "streamrag.telemetry",
    "AnswerChunk": "streamrag.core",
    "Append": "streamrag.core",
    "AppendMode": "streamrag.modes",
    "Chunk": "streamrag.core",
    "CutShort": "streamrag.core",
    "Hint": "streamrag.core",
    "OpenAIBackend": "streamrag.backends.openai",
    "Pipeline": "streamrag.pipeline",
    "Prompt": "streamrag.core",
    "PromptTemplate": "streamrag.modes",
    "RetrieverSource": "streamrag.sources.retriever",
    "SamplingParams": "streamrag.core",
    "Skipped": "streamrag.core",
    "StreamRagError": "streamrag.errors",
    "StreamedTokens": "streamrag.backends.vllm.client.token_streams",
    "StretchedSource": "streamrag.sources.stretch",
    "TokenStream": "streamrag.backends.vllm.client.token_streams",
    "TokenStreams": "streamrag.backends.vllm.client.token_streams",
    "Turn": "streamrag.core",
    "Update": "streamrag.core",
    "UpdateMode": "streamrag.modes",
    "VectorSource": "streamrag.sources.vector",
    "VllmBackend": "streamrag.backends.vllm",
    "WebSource": "streamrag.sources.web",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except KeyError:
        raise AttributeError(f"module 'streamrag' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
