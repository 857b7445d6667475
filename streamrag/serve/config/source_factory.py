"""The source of a service, or of a command that retrieves: it needs none of the packages that a service needs."""

import os
from collections.abc import Mapping

from streamrag.core import Source
from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import SourceSettings


def make_source(told: SourceSettings) -> Source | None:
    """The source, or None if clients bring their context.

    :raises ConfigurationError: values that cannot work.
    """
    if told.index is not None:
        if told.hybrid or told.rerank is not None or told.sentences is not None:
            from streamrag.sources.search.hybrid import HybridSource

            return HybridSource(
                told.index, k=told.k, reranker=told.rerank, sentences=told.sentences, embedder=told.embedder
            )
        from streamrag.sources.search.ivf import index_source

        return index_source(told.index, k=told.k, embedder=told.embedder)
    if told.postgres is not None:
        from streamrag.sources.embedder import DEFAULT_EMBEDDER
        from streamrag.sources.postgres.source import PgVectorSource

        dsn = dsn_of(told.postgres.get_secret_value())
        return PgVectorSource(dsn, table=told.table, k=told.k, embedder=told.embedder or DEFAULT_EMBEDDER)
    if told.trace is not None:
        from streamrag.sources.replay import ReplaySource

        return ReplaySource(told.trace)
    if not told.urls:
        return None
    from streamrag.sources.crawl.web import WebSource

    return WebSource(
        list(told.urls),
        max_depth=told.max_depth,
        max_pages=told.max_pages,
        crawl_timeout_s=told.crawl_timeout_s,
        same_host=told.same_host,
        allow_private=told.allow_private,
        obey_robots=told.obey_robots,
        cache_folder=told.cache_folder,
        sitemaps=told.sitemaps,
        send_traceparent=told.send_traceparent,
        cdp_url=told.cdp_url,
    )


def dsn_of(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A DSN, or that in an environment variable, as `env:NAME`.

    :raises ConfigurationError: there is no such variable.
    """
    if not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    if not environment.get(name):
        raise ConfigurationError(f"{text}: there is no environment variable {name}")
    return environment[name]
