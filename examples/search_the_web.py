"""A search engine of one's own (SearXNG) gives the pages to start from; a crawl reads them.

python examples/search_the_web.py http://127.0.0.1:8888 "Why does the printer jam?"
"""

import argparse
import asyncio
import sys
from contextlib import aclosing

from streamrag import Append, CrawlOptions, Skipped, StreamRagError, WebSource, search_engine


async def main(engine: str, question: str, allow_private: bool) -> None:
    source = WebSource(search_engine(engine, num_results=5), CrawlOptions(max_depth=0, allow_private=allow_private))
    await source.start(print)
    try:
        async with aclosing(source.stream(question)) as events:
            async for event in events:
                if isinstance(event, Append):
                    print(f"{event.chunk.uri}: {event.chunk.text.splitlines()[-1]}")
                elif isinstance(event, Skipped):
                    print(f"{event.uri} is left out: {event.reason}")
    finally:
        await source.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="the address of a SearXNG that answers in JSON")
    parser.add_argument("question")
    parser.add_argument("--allow-private", action="store_true", help="read pages of private addresses too")
    arguments = parser.parse_args()
    try:
        asyncio.run(main(arguments.engine, arguments.question, arguments.allow_private))
    except StreamRagError as error:  # an engine that is not there, pages that cannot be reached
        sys.exit(f"{type(error).__name__}: {error}")
