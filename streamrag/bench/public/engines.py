"""Run the load of the public benchmark on one engine: vLLM in this program, its simulation, or a server."""

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from streamrag.backends.openai.http import Server
from streamrag.bench.arms import QueryTiming
from streamrag.bench.cell import Arm, CellSettings
from streamrag.bench.provenance import versions
from streamrag.bench.public.results import EngineName, PublicResult, QueryTimes, ShortText
from streamrag.bench.public.server import ServerApi, ServerClient, play_on_server
from streamrag.bench.public.workload import PublicLoad, make_trace
from streamrag.bench.runner import run_cell
from streamrag.bench.workload import fit_contexts, make_load
from streamrag.engine.costs.profile_files import load_profile
from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, validated
from streamrag.trace.values import Trace, TracedQuery

ARMS: Mapping[EngineName, Arm] = {"streamrag": "streaming", "vllm-sessions": "stock-sessions"}
TIMEOUT_S = 600.0  # seconds in which a server must send something

Timings: TypeAlias = Mapping[str, QueryTiming | str]  # by query id: times from the start, or the reason of a failure


@validated
@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """The engine to measure. A `url` is of a server, a `profile` of a simulation; else vLLM runs in this program.

    :raises ConfigurationError: values are invalid, or do not go together.
    """

    engine: EngineName
    model: ShortText = ""
    url: str = ""
    api: ServerApi = "completions"
    api_key: str | None = None
    profile: str = ""
    hardware: ShortText = ""
    max_num_batched_tokens: Count | None = None

    def __post_init__(self) -> None:
        if (self.engine == "server") != bool(self.url):
            raise ConfigurationError(f"engine {self.engine!r}, URL {self.url!r}: the engine 'server' alone has a URL")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise ConfigurationError(f"URL {self.url!r} is not an address like http://127.0.0.1:8000")
        if bool(self.model) == bool(self.profile):
            raise ConfigurationError("give either a model or, without a URL, the hardware profile of a simulation")


def run_public(engine: EngineUnderTest, load: PublicLoad, seeds: Sequence[int], *, name: str = "") -> PublicResult:
    """Replay the load with each seed, and return the result. In wall time that takes as long as the load.

    :raises ConfigurationError: the settings are invalid, or vLLM's own sessions are to replay updates.
    :raises StreamRagError: the engine cannot start, or the server fails at once.
    """
    profile = load_profile(engine.profile) if engine.profile else None
    here = "not stated" if engine.url else f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    queries: list[QueryTimes] = []
    num_cut = 0
    provenance: dict[str, Any] = versions()
    for seed in seeds:
        trace, settings = make_trace(load, seed), _cell(engine, load, seed)
        timings, facts = _on_server(engine, settings, trace) if engine.url else _on_vllm(settings, trace)
        queries += (_times(seed, query, timings) for query in trace.queries[load.num_warm_up :])
        num_cut += facts.pop("num_contexts_cut", 0)
        provenance |= facts
    return PublicResult(
        name=name or f"{engine.engine}{'-simulated' if profile else ''}",
        engine=engine.engine,
        is_simulated=profile is not None,
        hardware=engine.hardware or (profile.device if profile else here),
        model=profile.name if profile else engine.model,
        load=load,
        seeds=tuple(seeds),
        num_contexts_cut=num_cut,
        provenance=provenance,
        queries=tuple(queries),
    )


def _cell(engine: EngineUnderTest, load: PublicLoad, seed: int) -> CellSettings:
    """Return the settings of the cell that replays the load with this seed."""
    return CellSettings(
        "virtual" if engine.profile else "wall",
        f"public {load.lengths} {load.retrieval}",
        ARMS.get(engine.engine, "no-streaming"),
        seed=seed,
        num_output_tokens=load.num_output_tokens,
        profile=engine.profile or None,
        model=engine.model or None,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_context_tokens=load.max_context_tokens,
    )


def _on_vllm(settings: CellSettings, trace: Trace) -> tuple[Timings, dict[str, Any]]:
    """Run a cell on vLLM or its simulation, and return the timings of answered queries, and the provenance."""
    result = run_cell(settings, trace=trace)
    timings = {r.query_id: QueryTiming(r.retrieval_end_s, r.first_token_s, r.finished_s) for r in result.requests}
    return timings, dict(result.provenance)


def _on_server(engine: EngineUnderTest, settings: CellSettings, trace: Trace) -> tuple[Timings, dict[str, Any]]:
    """Replay the cell's load on the server, after a short request, and return what `_on_vllm` returns."""
    load = fit_contexts(settings, make_load(settings, trace), None)

    async def play() -> tuple[Timings, dict[str, Any]]:
        url = engine.url.rstrip("/")
        base_url = url if urlsplit(url).path else f"{url}/v1"
        server = Server(base_url, api_key=engine.api_key, timeout_s=TIMEOUT_S, max_retries=0, retry_delay_s=0.0)
        async with aclosing(server):
            client = ServerClient(server, engine.model, engine.api)
            await client.warm_up()
            timings = await play_on_server(client, load.queries, settings.num_output_tokens)
            return timings, {"api": engine.api, "has_fixed_length": "ignore_eos" in client.body, **load.provenance()}

    return asyncio.run(play())


def _times(seed: int, query: TracedQuery, timings: Timings) -> QueryTimes:
    """Return the times of a query from its question, or its error."""
    timing = timings.get(query.query_id, "it was not answered")
    if isinstance(timing, str):
        return QueryTimes(id=query.query_id, seed=seed, error=timing[:2_000])
    times = (timing.retrieval_end_s, timing.first_token_s, timing.finished_s)
    end_s, first_s, last_s = (max(at_s - query.arrival_s, 0.0) for at_s in times)
    return QueryTimes(id=query.query_id, seed=seed, retrieval_end_s=end_s, first_token_s=first_s, last_token_s=last_s)
