"""A service on a real socket, in the test's own event loop, and what it is asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.routing import BaseRoute

from streamrag import Append, Chunk, SourceEvent
from streamrag.serve import Limits, Service, create_app
from streamrag.serve.connections.gate import Gate
from streamrag.serve.observe.observer import FailedRequest, Interface, Observer, QueryOutcome, Refusal, ServedQuery
from streamrag.serve.server import QuietServer, listen, uvicorn_config
from streamrag.telemetry import Answer, QueryEvent
from streamrag.testing import ScriptedBackend, ScriptedSource, Step

PARIS = Chunk("Paris is the capital of France.", "https://geo.example/france", "France")
ROME = Chunk("Rome is the capital of Italy.", "https://geo.example/italy", "Italy")

CHUNKS: tuple[SourceEvent, ...] = (Append(PARIS), Append(ROME))
PATIENCE_S = 120.0


def limits_of(**values: Any) -> Limits:
    """Limits with these values, also for those that are constants."""
    return Limits().model_copy(update=values)


@dataclass
class Watcher:
    """An observer that remembers."""

    started: list[ServedQuery] = field(default_factory=list)
    events: list[QueryEvent] = field(default_factory=list)
    ended: list[tuple[str, QueryOutcome]] = field(default_factory=list)
    answers: list[Answer | None] = field(default_factory=list)
    refused: list[tuple[str, Interface, Refusal]] = field(default_factory=list)
    failed: list[FailedRequest] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """A query was admitted, and something has happened in it."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def query_started(self, query: ServedQuery) -> None:
        self.started.append(query)

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None:
        self.events.append(event)
        self.has_begun.set()

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        self.ended.append((query.interface, outcome))
        self.answers.append(answer)
        self.has_ended.set()

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self.refused.append((client, interface, why))

    def request_failed(self, request: FailedRequest) -> None:
        self.failed.append(request)


@dataclass
class Serving:
    """What a test has in hand: the service, its parts, where it listens, and a client."""

    service: Service
    source: ScriptedSource
    backend: Any
    watcher: Watcher
    url: str
    http: httpx.AsyncClient
    app: Gate


@asynccontextmanager
async def serving(
    steps: Sequence[Step] | Callable[[str], Iterable[Step]] = CHUNKS,
    *,
    backend: Any = None,
    limits: Limits | None = None,
    keys: Mapping[str, str] | None = None,
    app_options: Mapping[str, Any] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    observers: Sequence[Observer] = (),
    **options: Any,
) -> AsyncIterator[Serving]:
    """A service that retrieves `steps` and answers with `backend`, listening on a free port of loopback.

    Unless a test limits `head_s`, a connection may say nothing for as long as a busy machine takes.
    """
    limits = limits or Limits()
    if "head_s" not in vars(limits):
        limits = limits.model_copy(update={"head_s": PATIENCE_S})
    source = ScriptedSource(steps)
    backend = ScriptedBackend(answer="It is Paris [1].") if backend is None else backend
    watcher = Watcher()
    service = Service(backend, source, limits=limits, observers=[watcher, *observers], model_name="scripted", **options)
    await service.start()
    sock = listen("127.0.0.1", 0)
    app = create_app(service, keys=keys, **(app_options or {}))
    app._app.router.routes.extend(more_routes)  # type: ignore[attr-defined]
    server = QuietServer(uvicorn_config(app, service.limits))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    await server.listens.wait()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    headers = {"authorization": f"Bearer {next(iter(keys))}"} if keys else {}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as http:
            yield Serving(service, source, backend, watcher, url, http, app)
    finally:
        await service.aclose()
        server.should_exit = True
        await running
    assert source.num_streams == 0, "retrieval is left running"
    assert not service.queries
