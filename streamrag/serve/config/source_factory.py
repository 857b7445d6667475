"""Makes the source of a service or of a command, without importing the packages that only a service needs."""

import os
from typing import Any

from streamrag.core import Source
from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import CRAWL, SourceSettings
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER


def make_source(settings: SourceSettings) -> Source | None:
    """Return the first of index, PostgreSQL, trace and URLs that is set, as a source, not started; None if none is.

    An index is searched by vector and keyword if `hybrid`, `rerank` or `sentences` says so, else by vector. Raises
    ConfigurationError for invalid settings.
    """
    if settings.index is not None:
        options: dict[str, Any] = {"k": settings.k, "embedder": settings.embedder}
        if settings.hybrid or settings.rerank is not None or settings.sentences is not None:
            from streamrag.sources.search.hybrid import HybridSource

            return HybridSource(settings.index, reranker=settings.rerank, sentences=settings.sentences, **options)
        from streamrag.sources.search.vector import index_source

        return index_source(settings.index, **options)
    if settings.postgres is not None:
        from streamrag.sources.postgres.source import PgVectorSource

        dsn = resolve_dsn(settings.postgres.get_secret_value())
        embedder = settings.embedder or DEFAULT_EMBEDDER
        return PgVectorSource(dsn, table=settings.table, k=settings.k, embedder=embedder)
    if settings.trace is not None:
        from streamrag.trace.replay import ReplaySource

        return ReplaySource(settings.trace)
    if not settings.urls:
        return None
    from streamrag.sources.crawl.options import CrawlOptions
    from streamrag.sources.crawl.web import WebSource

    return WebSource(list(settings.urls), CrawlOptions(**{name: getattr(settings, name) for name in CRAWL}))


def resolve_dsn(text: str) -> str:
    """Return a DSN; `env:NAME` is read from the environment. Raises ConfigurationError if NAME is not set."""
    if not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    if not os.environ.get(name):
        raise ConfigurationError(f"{text}: there is no environment variable {name}")
    return os.environ[name]
