"""The service that is attacked, in a process of its own: `python -m studies.attacks.service [--keys] [--core N]`.

Prints the port in one line once the service listens.
"""

import argparse
import asyncio
import os
import sys
from typing import Any

from streamrag import Append, Chunk
from streamrag.serve import Service, create_app
from streamrag.serve.server import listen, serve

from .engine import SteppedBackend

KEYS = {"key-of-victim-0123456789": "victim", "key-of-attacker-01234567": "attacker"}
VICTIM, ATTACKER = KEYS
RETRIEVAL_S = 0.02

PASSAGES = [
    Chunk(f"Passage {number}: " + "the capital of France is Paris. " * 8, f"https://geo.example/{number}")
    for number in range(3)
]


class PausingSource:
    """Retrieval that takes `RETRIEVAL_S`."""

    name = "pausing"

    async def stream(self, query: str) -> Any:
        yield Append(PASSAGES[0])
        await asyncio.sleep(RETRIEVAL_S)
        for passage in PASSAGES[1:]:
            yield Append(passage)


async def main(has_keys: bool) -> int:
    """Serve until SIGTERM, with the default limits; the exit status is the service's."""
    service = Service(SteppedBackend(), PausingSource(), model_name="stepped", overlap=True)
    sock = listen("127.0.0.1", 0)
    await service.start()
    port = sock.getsockname()[1]
    app = create_app(service, keys=KEYS if has_keys else None)
    return await serve(app, service, sock, on_ready=lambda: print(port, flush=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--core", type=int)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    sys.exit(asyncio.run(main(args.keys)))
