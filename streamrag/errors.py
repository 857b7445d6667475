"""The exceptions of streamrag. Each message names the offending value and what to do.

    StreamRagError
    ├── ConfigurationError            a value that cannot work
    │   ├── MissingDependencyError    an optional package is not installed
    │   ├── UnsupportedVersionError   an installed package has an unsupported version
    │   ├── ModelError                the model cannot be loaded
    │   ├── AlreadyStartedError       a source, a backend or a recorder has an owner already
    │   ├── TraceError                a trace cannot be read or written
    │   ├── SessionLogError           a session's log cannot be read or written
    │   │   └── SessionLogInUseError  another session uses it
    │   └── VectorIndexError          a vector index cannot be used
    │       ├── IndexMissingError     there is none at this path
    │       ├── IndexCorruptError     its files are damaged or incomplete
    │       ├── IndexMismatchError    it was built with another embedder or dimension
    │       └── IndexExistsError      building would overwrite it
    ├── PipelineClosedError           the pipeline was closed
    ├── TooManyQueriesError           rejected: the pipeline is full
    ├── TooManySessionsError          rejected: a limit on sessions is reached
    ├── DeadlineExceededError         the query's deadline passed
    ├── PromptTooLongError            the question does not fit the model's length
    ├── SourceError                   retrieval failed
    │   ├── UnreachableError          no start address could be fetched
    │   ├── UnsafeUrlError            an address must not be fetched
    │   └── WorkerError               a worker process died or timed out
    └── BackendError                  the engine or server failed
        ├── EngineDeadError           the embedded engine is gone
        └── ServerError               an OpenAI-compatible server failed

`except StreamRagError` catches them all.
"""

import importlib.util

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WITH_CPU_BUILD = {"embed", "vllm"}
"""Extras that bring gigabytes for CUDA, unless installed as `embed-cpu` or `vllm-cpu`."""


def install_line(extra: str) -> str:
    """Return the command that installs an extra, and another for machines without a GPU where that makes a difference.

    No command asks the package index for "streamrag": until it is published, that name may be anyone's.
    """
    line = "pip install . ./bench" if extra == "bench" else f"pip install '.[{extra}]'"  # bench is a distribution
    if extra in WITH_CPU_BUILD:
        line += f"  or, without a GPU,  pip install '.[{extra}-cpu]' --extra-index-url {CPU_TORCH_INDEX}"
    return f"{line}  (the dot is a checkout of streamrag, or its wheel)"


class StreamRagError(Exception):
    """The base class of all exceptions that streamrag raises on purpose."""


class ConfigurationError(StreamRagError, ValueError):
    """A value that cannot work; the message names it and the remedy."""


class MissingDependencyError(ConfigurationError):
    """An optional package is not installed; the message has the install line."""

    def __init__(self, package: str, install: str) -> None:
        super().__init__(f"{package} is not installed. Install it with:  {install}")
        self.package = package
        self.install = install


def distribution_of(module: str) -> str:
    """Return the name under which a module is installed."""
    return {"faiss": "faiss-cpu", "markdown_it": "markdown-it-py"}.get(module, module.replace("_", "-"))


def require_modules(extra: str, *modules: str) -> None:
    """Check that modules of an extra are installed, without importing them.

    :raises MissingDependencyError: one of them is not.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(distribution_of(module), install_line(extra))


class UnsupportedVersionError(ConfigurationError):
    """An installed package has a version that streamrag does not support."""


class ModelError(ConfigurationError):
    """The model cannot be loaded."""


class AlreadyStartedError(ConfigurationError):
    """A source, a backend or a recorder was started a second time; its first owner is not affected."""


class TraceError(ConfigurationError):
    """A trace cannot be read or written; the message names the file and the line."""


class SessionLogError(ConfigurationError):
    """A session's log cannot be read or written; the message names the file."""


class SessionLogInUseError(SessionLogError):
    """Another session uses the log, in this process or in another."""


class VectorIndexError(ConfigurationError):
    """A vector index cannot be used."""


class IndexMissingError(VectorIndexError):
    """No index exists at this path."""


class IndexCorruptError(VectorIndexError):
    """The files of an index are damaged or incomplete."""


class IndexMismatchError(VectorIndexError):
    """The index was built with another embedder or dimension."""


class IndexExistsError(VectorIndexError):
    """Building would overwrite an index."""


class PipelineClosedError(StreamRagError):
    """The pipeline was closed before the query, or before its answer was complete."""


class TooManyQueriesError(StreamRagError):
    """A query was rejected because the pipeline runs as many as it may."""


class TooManySessionsError(StreamRagError):
    """A session was rejected because a limit on sessions, or on tokens in their windows, is reached.

    `limit` names it: "sessions" or "session_tokens", with "client_" before it if it is a tenant's limit.
    """

    def __init__(self, message: str, limit: str = "sessions") -> None:
        super().__init__(message)
        self.limit = limit


class DeadlineExceededError(StreamRagError, TimeoutError):
    """The query's deadline passed before its answer was complete."""


class PromptTooLongError(StreamRagError, ValueError):
    """System text, history and question alone do not fit the model's length."""


class SourceError(StreamRagError):
    """The source of a query failed, so that retrieval ended early."""


class UnreachableError(SourceError):
    """No start address could be fetched."""


class UnsafeUrlError(SourceError, ValueError):
    """An address must not be fetched, for example because it is private."""


class WorkerError(SourceError):
    """A worker process died or did not answer in time."""


class BackendError(StreamRagError):
    """The engine or server failed."""


class EngineDeadError(BackendError):
    """The embedded engine is gone."""


class ServerError(BackendError):
    """An OpenAI-compatible server rejected the request or broke off."""
