"""A service in a process of its own, for signals: `python -m tests.serve.scripted_server '{"backend": "endless"}'`.

Says in one line of JSON where it listens. A query "die" kills the engine, as far as one can tell from outside; "wait"
retrieves for half a second.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

from streamrag import Append, Chunk
from streamrag.core import BackendEvent, Prompt, SamplingParams
from streamrag.errors import EngineDeadError
from streamrag.serve import Limits, Service, create_app
from streamrag.serve.server import listen, serve
from streamrag.testing import ScriptedBackend, ScriptedSource, Step


class MortalBackend(ScriptedBackend):
    """Dies when it is told to; is well again once it was started anew. One that hangs raises nothing in its queries."""

    def __init__(self, *, hangs: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.died = asyncio.Event()
        self._hangs = hangs

    async def start(self, progress: Any) -> None:
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


async def main(*, backend: str, limits: dict[str, Any], **options: Any) -> int:
    """The exit status."""
    engine = MortalBackend(answer="It is Paris.", is_endless=backend == "endless", hangs=True)

    def steps(query: str) -> Iterable[Step]:
        yield Append(Chunk("Paris is the capital of France.", "https://geo.example/france"))
        if query == "wait":
            yield 0.5
        if query == "die":
            engine.died.set()

    service = Service(engine, ScriptedSource(steps), limits=Limits(**limits), model_name="scripted", **options)
    sock = listen("127.0.0.1", 0)
    await service.start()
    address = {"url": f"http://127.0.0.1:{sock.getsockname()[1]}"}
    return await serve(create_app(service), service, sock, on_ready=lambda: print(json.dumps(address), flush=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(**json.loads(sys.argv[1]))))
