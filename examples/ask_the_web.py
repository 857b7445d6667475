"""The ten lines of the README, with addresses and model from the command line.

    python examples/ask_the_web.py MODEL QUESTION URL [URL ...]

Add `--allow-private` to crawl a site on your own machine.
"""

import asyncio
import sys

from streamrag import CrawlOptions, Pipeline, VllmBackend, WebSource


async def main(model: str, question: str, urls: list[str], allow_private: bool) -> None:
    source = WebSource(urls, CrawlOptions(allow_private=allow_private))
    async with Pipeline(source=source, backend=VllmBackend(model)) as pipeline:
        async with pipeline.stream(question) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
        for citation in stream.result.citations:
            print(citation.number, citation.title, citation.uri)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--allow-private"]
    if len(arguments) < 3:
        sys.exit(__doc__)
    asyncio.run(main(arguments[0], arguments[1], arguments[2:], "--allow-private" in sys.argv))
