"""The exceptions of streamrag; each message names the value that was wrong, and the remedy.

    StreamRagError
    ├── ConfigurationError            a value that cannot work; the message names it and the remedy
    │   ├── MissingDependencyError    an optional part is not installed; the message has the install line
    │   ├── UnsupportedVersionError   an installed package has a version that streamrag does not run on
    │   ├── ModelError                the model cannot be loaded
    │   ├── AlreadyStartedError       a source, a backend or a recorder has an owner already
    │   ├── TraceError                a trace cannot be read or written
    │   ├── SessionLogError           a session's log cannot be read or written
    │   │   └── SessionLogInUseError  another session has it, here or in another process
    │   └── VectorIndexError          a vector index cannot be used
    │       ├── IndexMissingError     there is none at this path
    │       ├── IndexCorruptError     its files are damaged or incomplete
    │       ├── IndexMismatchError    it was made with another embedder or dimension
    │       └── IndexExistsError      building would overwrite it
    ├── PipelineClosedError           a query on a pipeline that has been closed, or was before its end
    ├── TooManyQueriesError           refused: the pipeline is full
    ├── TooManySessionsError          refused: the tenant has as many sessions as may be, or all have
    ├── DeadlineExceededError         the query's deadline passed
    ├── PromptTooLongError            the question does not fit the model's length
    ├── SourceError                   retrieval failed
    │   ├── UnreachableError          no start address could be fetched
    │   ├── UnsafeUrlError            an address that is not allowed to be fetched
    │   └── WorkerError               a worker process died or did not answer in time
    └── BackendError                  the engine or server failed
        ├── EngineDeadError           the embedded engine is gone
        └── ServerError               an OpenAI-compatible server refused or broke off

`except StreamRagError` catches them all.
"""


class StreamRagError(Exception):
    """Everything that streamrag raises on purpose."""


class ConfigurationError(StreamRagError, ValueError):
    """A value that cannot work; the message names it and the remedy."""


class MissingDependencyError(ConfigurationError):
    """An optional part is not installed."""

    def __init__(self, package: str, install: str) -> None:
        super().__init__(f"{package} is not installed. Install it with:  {install}")
        self.package = package
        self.install = install


class UnsupportedVersionError(ConfigurationError):
    """An installed package has a version that streamrag does not run on."""


class ModelError(ConfigurationError):
    """The model cannot be loaded."""


class AlreadyStartedError(ConfigurationError):
    """A source or a backend is started a second time; the first owner goes on using it."""


class TraceError(ConfigurationError):
    """A trace cannot be read or written; the message names the file, and the line."""


class SessionLogError(ConfigurationError):
    """A session's log cannot be read or written, or is in use; the message names the file."""


class SessionLogInUseError(SessionLogError):
    """Another session has the log, here or in another process."""


class VectorIndexError(ConfigurationError):
    """A vector index cannot be used."""


class IndexMissingError(VectorIndexError):
    """No index exists at this path."""


class IndexCorruptError(VectorIndexError):
    """The files of an index are damaged or incomplete."""


class IndexMismatchError(VectorIndexError):
    """The index was made with another embedder or dimension."""


class IndexExistsError(VectorIndexError):
    """Building would overwrite an index."""


class PipelineClosedError(StreamRagError):
    """A query on a pipeline that has been closed, or was closed before the answer was complete."""


class TooManyQueriesError(StreamRagError):
    """A query was refused: as many as the pipeline allows are running."""


class TooManySessionsError(StreamRagError):
    """A session was refused: a tenant's, or the common, limit of sessions or of tokens in their windows is reached.

    `limit` is "sessions" or "session_tokens", or with "client_" before it, if it is the tenant's.
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
    """An address that is not allowed to be fetched."""


class WorkerError(SourceError):
    """A worker process died, or did not answer in time."""


class BackendError(StreamRagError):
    """The engine or server failed."""


class EngineDeadError(BackendError):
    """The embedded engine is gone."""


class ServerError(BackendError):
    """An OpenAI-compatible server refused the request or broke off."""
