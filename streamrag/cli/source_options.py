"""Command-line options that name a source, shared by the commands that retrieve."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import SecretStr

from streamrag.core import Source
from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import SourceSettings
from streamrag.serve.config.source_factory import make_source as make_service_source

DSN_HELP = "postgresql://user@host/database, or env:NAME for a variable that holds it and keeps passwords hidden"

CRAWL_FLAGS: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("--depth", "max_depth", {"type": int, "metavar": "N"}),
    ("--max-pages", "max_pages", {"type": int, "metavar": "N"}),
    ("--timeout", "crawl_timeout_s", {"type": float, "metavar": "S"}),
    ("--any-host", "same_host", {"action": "store_false", "help": "follow links to other hosts too"}),
    ("--allow-private", "allow_private", {"action": "store_true"}),
    ("--ignore-robots", "obey_robots", {"action": "store_false", "help": "do not read robots.txt; for your own sites"}),
    ("--sitemaps", "sitemaps", {"action": "store_true"}),
    ("--cache", "cache_folder", {"metavar": "FOLDER"}),
    ("--cdp-url", "cdp_url", {"metavar": "URL"}),
)
"""Flags of a crawl, and the settings that they set, whose defaults and meanings are those of `CrawlOptions`."""


def add_source_arguments(parser: argparse.ArgumentParser, *, takes_trace: bool = False) -> None:
    """Add the options of a crawl and of a search; exactly one of a page, an index, a table and, if the command takes
    one, a trace must be given."""
    add = parser.add_argument_group("where to look (one of)").add_mutually_exclusive_group(required=True).add_argument
    about = "crawl from this page; may be given more than once"
    add("--url", dest="urls", action="append", metavar="URL", help=about)
    add("--index", metavar="FOLDER", help="search an index made by `streamrag index build`")
    add("--postgres", type=SecretStr, metavar="DSN", help=f"search a table with pgvector: {DSN_HELP}")
    if takes_trace:
        add("--trace", metavar="FILE", help="replay a recording of `streamrag record`")
    crawling = parser.add_argument_group("crawling")
    for flag, name, more in CRAWL_FLAGS:
        field = SourceSettings.model_fields[name]
        has_value = field.default is not None and field.annotation is not bool
        about = f"{field.description} (%(default)s)" if has_value else f"{field.description}"
        crawling.add_argument(flag, dest=name, **{"default": field.default, "help": about, **more})
    search = parser.add_argument_group("searching")
    search.add_argument("--table", default="passages", metavar="NAME", help="table of --postgres (%(default)s)")
    add_search_arguments(search)


def add_search_arguments(search: "argparse._ArgumentGroup") -> None:
    """Add the options of how to search: embedder, hybrid, rerank, sentences and k, but not the index to search."""
    add = search.add_argument
    about = "the index's embedding model, if not the default; its code is loaded, so name only models you trust"
    add("--embedder", metavar="NAME", help=about)
    about = "search by keywords too, and fuse both rankings; --no-hybrid searches by vectors alone"
    add("--hybrid", action=argparse.BooleanOptionalAction, default=True, help=about)
    about = "rerank with late-interaction, or a cross-encoder (name or path) that you trust"
    add("--rerank", metavar="NAME", help=about)
    about = "with --rerank: the best N sentences instead of whole passages"
    add("--sentences", type=int, metavar="N", help=about)
    add("-k", type=int, default=10, metavar="N", help="number of passages in the context (%(default)s)")


def make_source(arguments: argparse.Namespace, **changes: Any) -> Source:
    """Return the source that the options name, not started; `changes` override options by names of `SourceSettings`.

    :raises ConfigurationError: a value is invalid, or --rerank or --sentences was given without --index.
    """
    values = {**vars(arguments), **changes}
    if values["index"] is None and (values["rerank"] is not None or values["sentences"]):
        raise ConfigurationError("--rerank and --sentences need --index, which was not given")
    settings = {name: values[name] for name in SourceSettings.model_fields if name in values}
    source = make_service_source(SourceSettings.model_construct(**settings))  # unchecked: the sources check
    assert source is not None
    return source
