"""Queries played on lanes, or on as many engines that do both, in virtual time.

both       query ─▶ router ─▶ engine: prompt and answer
lanes      query ─▶ router ─▶ prefill lane ─▶ router ─▶ link ─▶ decode lane
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.routing import Opening, ReplicaTracker, Router
from streamrag.trace.values import TracedAppend, TracedQuery, chunks_of
from streamrag_bench.workload import NUM_TAIL_TOKENS, moments_of
from studies.lanes.engines import LaneEngine
from studies.routing.cells import soonest
from studies.routing.fleet import REPORT_S
from studies.routing.loads import BLOCK, Piece, Pieces, Query, blocks

LATENCY_S = 0.001
"""Seconds of a transfer besides its bytes: the request to the decode lane, and the beginning of the read. Assumed."""


@dataclass(frozen=True)
class Way:
    """How queries are played.

    budget: tokens of a step.
    num_prefill: prefill lanes; the other engines only decode. 0: every engine does both.
    kv_bytes_per_token: what crosses a link for each token of a prompt.
    reuses: whether blocks that a decode lane has are not sent again.
    """

    num_engines: int
    budget: int
    num_prefill: int = 0
    link_bytes_s: float = 1.0
    kv_bytes_per_token: int = 0
    reuses: bool = True


@dataclass(frozen=True)
class Timing:
    """What one query took: seconds from the end of its retrieval, and blocks of KV that were sent and that were not."""

    first_s: float
    last_s: float
    per_token_s: float
    num_prompt: int  # tokens, as simulated
    num_answer: int
    num_sent: int = 0
    num_reused: int = 0


@dataclass
class Outcome:
    """The timings of all queries, and the seconds until the last one ended."""

    timings: list[Timing] = field(default_factory=list)
    seconds: float = 0.0


class LaneGroup:
    """Lanes of one kind, with the router that chooses among them."""

    def __init__(self, engines: dict[str, LaneEngine], router: Router) -> None:
        self.engines, self._router, self._tracker = engines, router, ReplicaTracker()

    def choose(self, query_id: str, token_ids: tuple[int, ...]) -> str:
        """Return the name of the best lane for a query with this prompt, and count the query there."""
        opening = Opening(token_ids)
        states = self._tracker.states(self.engines)
        name = self._router.rank(opening, states, asyncio.get_running_loop().time())[0]
        self._tracker.routed(query_id, name, self._router.routed(opening, name))
        return name

    def computed(self, query_id: str, name: str, token_ids: tuple[int, ...]) -> None:
        """Record a query's first token, and that the lane has its complete prompt."""
        self._tracker.first_token(query_id)
        self._router.completed(token_ids, name)

    def end(self, query_id: str) -> None:
        self._tracker.ended(query_id)

    async def report(self) -> None:
        """Report the state of each lane, every half second."""
        while True:
            now_s = asyncio.get_running_loop().time()
            for name, engine in self.engines.items():
                self._tracker.reported(name, engine.report(), now_s)
            await asyncio.sleep(REPORT_S)


class LanePlayer:
    """Plays queries on engines that it makes."""

    def __init__(self, way: Way, profile: StepProfile) -> None:
        first = range(way.num_prefill or way.num_engines)
        prefill = {f"e{n}": LaneEngine(profile, way.budget) for n in first}
        decode = {f"e{n}": LaneEngine(profile, way.budget, decodes=True) for n in range(len(first), way.num_engines)}
        self._way, self.outcome = way, Outcome()
        self._prefill, self._decode = LaneGroup(prefill, soonest()), LaneGroup(decode, soonest())

    async def play(self, queries: Sequence[Query]) -> Outcome:
        """Play all queries; the time of the loop begins at 0."""
        loop = asyncio.get_running_loop()
        reporting = [loop.create_task(group.report()) for group in (self._prefill, self._decode) if group.engines]
        async with asyncio.TaskGroup() as tasks:
            for number, query in enumerate(queries):
                await asyncio.sleep(query.arrival_s - loop.time())
                tasks.create_task(self._ask(f"q{number}", query))
        for task in reporting:
            task.cancel()
        await asyncio.gather(*reporting, return_exceptions=True)
        self.outcome.seconds = loop.time()
        return self.outcome

    async def _ask(self, query_id: str, query: Query) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + query.texts[-1][0]  # of retrieval
        lane, prompt, times_s = await self._prefill_lane(query_id, query)
        num_sent = num_reused = 0
        if self._way.num_prefill:
            num_sent, num_reused, times_s = await self._decode_lane(query_id, lane, prompt, query.num_output)
        self._prefill.end(query_id)
        first_s, last_s = times_s[0], times_s[-1]
        per_token_s = (last_s - first_s) / max(query.num_output - 1, 1)
        lengths = len(prompt) * BLOCK, query.num_output, num_sent, num_reused
        self.outcome.timings.append(Timing(first_s - end_s, last_s - end_s, per_token_s, *lengths))

    async def _prefill_lane(self, query_id: str, query: Query) -> tuple[str, tuple[int, ...], list[float]]:
        """Compute the prompt as it arrives, and the answer or one token of it. Return the lane, the prompt, and the
        times of the first and the last token."""
        loop, start_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        prompts = [(start_s + at_s, blocks(text)) for at_s, text in query.texts]
        await asyncio.sleep(prompts[0][0] - start_s)
        prompt = prompts[0][1]
        name = self._prefill.choose(query_id, prompt)
        engine = self._prefill.engines[name]
        num_output = 1 if self._way.num_prefill else query.num_output
        async with engine.stream(prompt, num_output, is_complete=len(prompts) == 1) as stream:
            for number, (at_s, prompt) in enumerate(prompts[1:], start=2):
                await asyncio.sleep(at_s - loop.time())
                await stream.update(prompt, is_complete=number == len(prompts))
            times_s = []
            async for _ in stream:
                times_s.append(loop.time())
                if len(times_s) == 1:
                    self._prefill.computed(query_id, name, prompt)
        return name, prompt, times_s

    async def _decode_lane(
        self, query_id: str, lane: str, prompt: tuple[int, ...], num_output: int
    ) -> tuple[int, int, list[float]]:
        """Send the prompt's KV from its prefill lane to a decode lane, and answer there. Return the blocks that were
        sent, those that were there, and the times of the first and the last token."""
        way, loop = self._way, asyncio.get_running_loop()
        name = self._decode.choose(query_id, prompt)
        engine, num_bytes = self._decode.engines[name], BLOCK * way.kv_bytes_per_token
        async with self._prefill.engines[lane].link, engine.link:
            num_reused = engine.num_found(prompt) if way.reuses else 0
            num_sent = len(prompt) - num_reused
            await asyncio.sleep(LATENCY_S + num_sent * num_bytes / way.link_bytes_s)
        self._prefill.end(query_id)
        times_s = []
        async with engine.stream(prompt, num_output, is_complete=True) as stream:
            async for _ in stream:
                times_s.append(loop.time())
                if len(times_s) == 1:
                    self._decode.computed(query_id, name, prompt)
        self._decode.end(query_id)
        return num_sent, num_reused, times_s


def play(queries: Sequence[Query], way: Way, profile: StepProfile) -> Outcome:
    """Play queries in virtual time."""

    async def run() -> Outcome:
        return await LanePlayer(way, profile).play(queries)

    return run_virtual(run())


def queries_of(traced: Sequence[TracedQuery], num_output: int) -> list[Query]:
    """Return the queries of a trace in the form of `routing.loads`. Each chunk gets whole blocks; the roundings of a
    prompt's chunks add up to less than one block."""
    named = Pieces()
    return [Query(query.arrival_s, tuple(_texts(query, named)), num_output) for query in traced]


def _texts(query: TracedQuery, named: Pieces) -> list[tuple[float, tuple[Piece, ...]]]:
    chunks: list[tuple[str, int]] = []
    texts = []
    for at_s, event, is_end in moments_of(query):
        new = [(chunk.key, chunk.num_tokens) for chunk in chunks_of(event)] if event else []
        chunks = chunks + new if event is None or isinstance(event, TracedAppend) else new
        all_of_it = [*chunks, (f"tail {query.query_id}", NUM_TAIL_TOKENS)] if is_end else chunks
        texts.append((at_s, tuple(_pieces(all_of_it, named))))
    return [text for text in texts if text[1]]


def _pieces(chunks: Sequence[tuple[str, int]], named: Pieces) -> list[Piece]:
    found, num_tokens = [], 0
    for key, num in chunks:
        num_blocks = round((num_tokens + num) / BLOCK) - round(num_tokens / BLOCK)
        num_tokens += num
        if num_blocks:
            found.append(named(key, num_blocks * BLOCK))
    return found
