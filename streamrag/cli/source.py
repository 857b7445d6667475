"""Where to look: the options of the commands that retrieve."""

import argparse

from streamrag.core import Source


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name a crawl or a search."""
    source = parser.add_argument_group("where to look (one of)").add_mutually_exclusive_group(required=True)
    source.add_argument("--url", action="append", metavar="URL", help="crawl from here; may be given more than once")
    source.add_argument("--index", metavar="FOLDER", help="search an index made by `streamrag index build`")
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
    crawl.add_argument("--cdp-url", metavar="URL", help="render pages in the browser at this CDP address")
    search = parser.add_argument_group("searching")
    search.add_argument(
        "--embedder", metavar="NAME", help="what the index was made with, if not the default; it is loaded, so trust it"
    )
    search.add_argument("-k", type=int, default=5, metavar="N", help="passages in the context (%(default)s)")


def make_source(arguments: argparse.Namespace) -> Source:
    """The source that these options name."""
    if arguments.index is not None:
        from streamrag.sources.ivf import index_source

        return index_source(arguments.index, k=arguments.k, embedder=arguments.embedder)
    from streamrag.sources.web import WebSource

    return WebSource(
        arguments.url,
        max_depth=arguments.depth,
        max_pages=arguments.max_pages,
        crawl_timeout_s=arguments.timeout,
        same_host=not arguments.any_host,
        allow_private=arguments.allow_private,
        cdp_url=arguments.cdp_url,
    )
