"""Run the load of the public benchmark on one engine: vLLM in this program, its simulation, or a server."""

import asyncio
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from streamrag.backends.openai.http import Server
from streamrag.engine.costs.profile_files import load_profile
from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, validated
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.arms import QueryTiming
from streamrag_bench.cell import Arm, CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.public.results import EngineName, PublicResult, QueryTimes, ShortText
from streamrag_bench.public.server import ServerApi, ServerClient, play_on_server
from streamrag_bench.public.workload import PublicLoad, make_trace, read_statistics
from streamrag_bench.runner import run_cell
from streamrag_bench.workload import fit_contexts, make_load, token_budget

ARMS: Mapping[EngineName, Arm] = {"streamrag": "streaming", "vllm-sessions": "stock-sessions"}
ADDRESS = re.compile(r"(?i)https?://([\w.-]+|\[[\d:.a-f]+\])(:\d+)?(/[^?#\s]*)?")
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
        if self.url and not ADDRESS.fullmatch(self.url):  # the error must not show a password
            raise ConfigurationError("the URL is not an address like http://127.0.0.1:8000, without user or password")
        if (self.engine == "server") != bool(self.url):
            raise ConfigurationError(f"engine {self.engine!r}, URL {self.url!r}: the engine 'server' alone has a URL")
        if bool(self.model) == bool(self.profile):
            raise ConfigurationError("give either a model or, without a URL, the hardware profile of a simulation")

    @property
    def name(self) -> str:
        """Usual name of the engine's result."""
        return f"{self.engine}{'-simulated' if self.profile else ''}"


def check_run(engine: EngineUnderTest, load: PublicLoad, seeds: Sequence[int]) -> None:
    """Raise ConfigurationError if the engine cannot replay the load, or if a seed is there twice."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigurationError(f"seeds {list(seeds)} must be different, and at least one")
    if engine.engine == "vllm-sessions" and read_statistics()["retrieval"][load.retrieval]["mode"] == "update":
        raise ConfigurationError(f"vllm-sessions can only append: retrieval {load.retrieval!r} has updates")


def run_public(engine: EngineUnderTest, load: PublicLoad, seeds: Sequence[int], *, name: str = "") -> PublicResult:
    """Replay the load with each seed, and return the result. In wall time that takes as long as the load.

    :raises ConfigurationError: the settings are invalid, or vLLM's own sessions are to replay updates.
    :raises StreamRagError: the engine cannot start, or the server fails at once.
    """
    check_run(engine, load, seeds)
    profile = load_profile(engine.profile) if engine.profile else None
    here = "not stated" if engine.url else f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    queries: list[QueryTimes] = []
    num_cut = 0
    num_short: list[int | None] = []
    provenance: dict[str, Any] = {}
    for seed in seeds:
        trace, settings = make_trace(load, seed), _cell(engine, load, seed)
        timings, facts = _on_server(engine, settings, trace) if engine.url else _on_vllm(settings, trace)
        queries += (_times(seed, query, timings) for query in trace.queries[load.num_warm_up :])
        num_cut += facts.pop("num_contexts_cut", 0)
        num_short.append(facts.pop("num_short_answers", 0))
        provenance |= facts
    return PublicResult(
        name=name or engine.name,
        engine=engine.engine,
        is_simulated=profile is not None,
        hardware=engine.hardware or (profile.device if profile else here),
        model=profile.name if profile else engine.model,
        load=load,
        seeds=tuple(seeds),
        num_contexts_cut=num_cut,
        num_short_answers=None if None in num_short else sum(num or 0 for num in num_short),
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
    limits = {"max_num_batched_tokens": token_budget(settings), "max_num_seqs": settings.max_num_seqs}
    return timings, {**result.provenance, **limits}


def _on_server(engine: EngineUnderTest, settings: CellSettings, trace: Trace) -> tuple[Timings, dict[str, Any]]:
    """Replay the cell's load on the server, after a short request, and return what `_on_vllm` returns."""
    load = fit_contexts(settings, make_load(settings, trace), None)

    async def play() -> tuple[Timings, dict[str, Any]]:
        url = engine.url.rstrip("/")
        base_url = url if url.count("/") > 2 else f"{url}/v1"
        server = Server(base_url, api_key=engine.api_key, timeout_s=TIMEOUT_S, max_retries=0, retry_delay_s=0.0)
        async with aclosing(server):
            client = ServerClient(server, engine.model, engine.api)
            await client.warm_up()
            timings = await play_on_server(client, load.queries, settings.num_output_tokens)
            has = {"has_fixed_length": "ignore_eos" in client.body, "has_cache_salt": "cache_salt" in client.body}
            own = {name: version for name, version in versions().items() if name in ("python", "streamrag")}
            return timings, own | has | {"api": engine.api, "num_short_answers": client.num_short} | load.provenance()

    return asyncio.run(play())


def _times(seed: int, query: TracedQuery, timings: Timings) -> QueryTimes:
    """Return the times of a query from its question, or its error."""
    timing = timings.get(query.query_id, "it was not answered")
    if isinstance(timing, str):
        return QueryTimes(id=query.query_id, seed=seed, error=timing[:2_000])
    times = (timing.retrieval_end_s, timing.first_token_s, timing.finished_s)
    end_s, first_s, last_s = (max(at_s - query.arrival_s, 0.0) for at_s in times)
    return QueryTimes(id=query.query_id, seed=seed, retrieval_end_s=end_s, first_token_s=first_s, last_token_s=last_s)
