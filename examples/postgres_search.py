"""A folder of documents becomes a table of PostgreSQL with pgvector; a search of it is seen getting better.

    python examples/postgres_search.py DSN FOLDER QUESTION [EMBEDDER]

DSN is postgresql://user@host/database. Run again, it embeds only what has changed in the folder.
"""

import asyncio
import sys
from contextlib import aclosing

from streamrag import PgVectorSource, Update, build_table


async def search(dsn: str, question: str, embedder: str) -> None:
    source = PgVectorSource(dsn, k=3, embedder=embedder)  # a Pipeline starts and closes it, and answers
    await source.start(print)
    try:
        async with aclosing(source.stream(question)) as events:
            async for event in events:
                if isinstance(event, Update):
                    best = event.chunks[0]
                    print("update:", ", ".join(f"{chunk.uri}#{chunk.passage}" for chunk in event.chunks))
        print(best.text)
    finally:
        await source.aclose()


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    dsn, folder, question, embedder = [*sys.argv[1:], "all-MiniLM-L6-v2"][:4]
    summary = build_table(folder, dsn, embedder=embedder)
    print(f"{summary.num_passages} passages of {summary.num_documents} documents, {summary.num_embedded} embedded")
    asyncio.run(search(dsn, question, embedder))
