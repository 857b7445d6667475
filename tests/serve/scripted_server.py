"""A service in a process of its own, for signals: `python -m tests.serve.scripted_server '{"backend": "endless"}'`.

Says in one line of JSON where it listens. A query with "wait" retrieves for half a second, or "for ever"; one with
"die" kills the engine, as far as one can tell from outside. A new engine never comes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anyio

from streamrag import Append, Chunk
from streamrag.core import BackendEvent, Prompt, SamplingParams
from streamrag.errors import EngineDeadError
from streamrag.serve import RestartBudget, Service, create_app
from streamrag.serve.server import listen, serve
from streamrag.testing import ScriptedBackend, ScriptedSource, Step
from tests.serve.serving import limits_of


class MortalBackend(ScriptedBackend):
    """Dies when it is told to; is well again once it was started anew. One that hangs raises nothing in its queries."""

    def __init__(self, *, hangs: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.died = asyncio.Event()
        self._hangs = hangs
        self.stays_dead = False

    async def start(self, progress: Any) -> None:
        if self.died.is_set() and self.stays_dead:
            await asyncio.Event().wait()
        await super().start(progress)
        self.died.clear()

    def check_health(self) -> None:
        if self.died.is_set():
            raise EngineDeadError("the engine was killed")

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        if self.died.is_set():
            raise EngineDeadError("the engine was killed")
        async for event in super().generate(prompts, params):
            yield event
            if self.died.is_set() and not self._hangs:
                raise EngineDeadError("the engine was killed")


async def main(*, backend: str, limits: dict[str, Any], restarts: bool = False) -> int:
    """The exit status."""
    hold = anyio.Event() if backend == "held" else None
    engine = MortalBackend(answer="It is Paris.", is_endless=backend == "endless", hangs=True, hold=hold)
    engine.stays_dead = True

    def steps(query: str) -> Iterable[Step]:
        yield Append(Chunk("Paris is the capital of France.", "https://geo.example/france"))
        if "wait" in query:
            yield 1000.0 if "for ever" in query else 0.5
        if "die" in query:
            engine.died.set()

    budget = RestartBudget() if restarts else None
    source = ScriptedSource(steps)
    service = Service(engine, source, limits=limits_of(**limits), model_name="scripted", restarts=budget)
    sock = listen("127.0.0.1", 0)
    await service.start()
    address = {"url": f"http://127.0.0.1:{sock.getsockname()[1]}"}
    return await serve(create_app(service), service, sock, on_ready=lambda: print(json.dumps(address), flush=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(**json.loads(sys.argv[1]))))
