"""Where to look: the options of the commands that retrieve."""

import argparse

from pydantic import SecretStr

from streamrag.core import Source
from streamrag.errors import ConfigurationError

DSN_HELP = "postgresql://user@host/database, or env:NAME of a variable that has it, so that nobody sees a password"


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name a crawl or a search."""
    source = parser.add_argument_group("where to look (one of)").add_mutually_exclusive_group(required=True)
    source.add_argument("--url", action="append", metavar="URL", help="crawl from here; may be given more than once")
    source.add_argument("--index", metavar="FOLDER", help="search an index made by `streamrag index build`")
    source.add_argument("--postgres", metavar="DSN", help=f"search a table with pgvector: {DSN_HELP}")
    crawl = parser.add_argument_group("crawling")
    crawl.add_argument(
        "--depth", type=int, default=2, metavar="N", help="links to follow from a start page (%(default)s)"
    )
    crawl.add_argument("--max-pages", type=int, default=20, metavar="N", help="most pages to fetch (%(default)s)")
    crawl.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for the whole crawl (%(default)g)"
    )
    crawl.add_argument("--any-host", action="store_true", help="follow links to other hosts too")
    crawl.add_argument("--allow-private", action="store_true", help="allow private and loopback addresses")
    crawl.add_argument(
        "--ignore-robots", action="store_true", help="do not ask what robots.txt allows: for sites of your own"
    )
    crawl.add_argument("--sitemaps", action="store_true", help="look for pages in the site's sitemaps too")
    crawl.add_argument("--cache", metavar="FOLDER", help="keep pages there for later questions")
    crawl.add_argument("--cdp-url", metavar="URL", help="render pages in the browser at this CDP address")
    search = parser.add_argument_group("searching")
    search.add_argument("--table", default="passages", metavar="NAME", help="of --postgres (%(default)s)")
    add_search_arguments(search)


def add_search_arguments(search: "argparse._ArgumentGroup") -> None:
    """Options that say how an index is searched."""
    search.add_argument(
        "--embedder", metavar="NAME", help="what the index was made with, if not the default; it is loaded, so trust it"
    )
    search.add_argument("--hybrid", action="store_true", help="search by keywords too, and fuse both rankings")
    search.add_argument(
        "--rerank",
        metavar="NAME",
        help="as --hybrid, then rerank: late-interaction, or a cross-encoder's name or path; it is loaded, so trust it",
    )
    search.add_argument(
        "--sentences", type=int, metavar="N", help="with --rerank: the best N sentences in place of whole passages"
    )
    search.add_argument("-k", type=int, default=5, metavar="N", help="passages in the context (%(default)s)")


def make_index_source(arguments: argparse.Namespace, *, k: int, sentences: int | None) -> Source:
    """The search of an index that these options name, of so many passages, or sentences of them."""
    from streamrag.serve.config.settings import SourceSettings
    from streamrag.serve.config.source import make_source as made_of

    told = SourceSettings.model_construct(  # unchecked, as below
        index=arguments.index,
        embedder=arguments.embedder,
        hybrid=arguments.hybrid,
        rerank=arguments.rerank,
        sentences=sentences,
        k=k,
    )
    source = made_of(told)
    assert source is not None
    return source


def make_source(arguments: argparse.Namespace) -> Source:
    """The source that these options name."""
    from streamrag.serve.config.settings import SourceSettings
    from streamrag.serve.config.source import make_source as made_of

    if arguments.index is None and (arguments.hybrid or arguments.rerank is not None or arguments.sentences):
        raise ConfigurationError("--hybrid, --rerank and --sentences are for --index, which was not given")
    told = SourceSettings.model_construct(  # unchecked: the sources check, in the words of these options
        urls=arguments.url or (),
        index=arguments.index,
        postgres=None if arguments.postgres is None else SecretStr(arguments.postgres),
        max_depth=arguments.depth,
        max_pages=arguments.max_pages,
        crawl_timeout_s=arguments.timeout,
        same_host=not arguments.any_host,
        allow_private=arguments.allow_private,
        obey_robots=not arguments.ignore_robots,
        sitemaps=arguments.sitemaps,
        cache_folder=arguments.cache,
        cdp_url=arguments.cdp_url,
        table=arguments.table,
        embedder=arguments.embedder,
        hybrid=arguments.hybrid,
        rerank=arguments.rerank,
        sentences=arguments.sentences,
        k=arguments.k,
    )
    source = made_of(told)
    assert source is not None
    return source
