"""Options of the commands that retrieve, and the source that they name."""

import argparse
from typing import Any

from pydantic import SecretStr

from streamrag.core import Source
from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import SourceSettings
from streamrag.serve.config.source_factory import make_source as make_source_of_service

DSN_HELP = "postgresql://user@host/database, or env:NAME of a variable that has it, so that nobody sees a password"


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that name a crawl or a search."""
    source = parser.add_argument_group("where to look (one of)").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--url", dest="urls", action="append", metavar="URL", help="crawl from here; may be given more than once"
    )
    source.add_argument("--index", metavar="FOLDER", help="search an index made by `streamrag index build`")
    source.add_argument("--postgres", type=SecretStr, metavar="DSN", help=f"search a table with pgvector: {DSN_HELP}")
    crawl = parser.add_argument_group("crawling")
    crawl.add_argument(
        "--depth",
        dest="max_depth",
        type=int,
        default=2,
        metavar="N",
        help="links to follow from a start page (%(default)s)",
    )
    crawl.add_argument("--max-pages", type=int, default=20, metavar="N", help="most pages to fetch (%(default)s)")
    crawl.add_argument(
        "--timeout",
        dest="crawl_timeout_s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for the whole crawl (%(default)g)",
    )
    crawl.add_argument("--any-host", dest="same_host", action="store_false", help="follow links to other hosts too")
    crawl.add_argument("--allow-private", action="store_true", help="allow private and loopback addresses")
    crawl.add_argument(
        "--ignore-robots",
        dest="obey_robots",
        action="store_false",
        help="do not ask what robots.txt allows: for sites of your own",
    )
    crawl.add_argument("--sitemaps", action="store_true", help="look for pages in the site's sitemaps too")
    crawl.add_argument("--cache", dest="cache_folder", metavar="FOLDER", help="keep pages there for later questions")
    crawl.add_argument("--cdp-url", metavar="URL", help="render pages in the browser at this CDP address")
    search = parser.add_argument_group("searching")
    search.add_argument("--table", default="passages", metavar="NAME", help="of --postgres (%(default)s)")
    add_search_arguments(search)


def add_search_arguments(search: "argparse._ArgumentGroup") -> None:
    """Add options that say how an index is searched."""
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


def make_source(arguments: argparse.Namespace, **changed: Any) -> Source:
    """Return the source that these options, with `changed` values, name; each is called as the setting of a service.

    :raises ConfigurationError: values that cannot work.
    """
    given = {**vars(arguments), **changed}
    if given["index"] is None and (given["hybrid"] or given["rerank"] is not None or given["sentences"]):
        raise ConfigurationError("--hybrid, --rerank and --sentences are for --index, which was not given")
    settings = {name: given[name] for name in SourceSettings.model_fields if name in given}
    source = make_source_of_service(SourceSettings.model_construct(**settings))  # unchecked: the sources check
    assert source is not None
    return source
