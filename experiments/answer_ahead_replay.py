"""One load with drafts and without, in virtual time: the real client of drafts, the real scheduler, no model.

    Arriving (workload) ──▶ ask ──▶ AnswerAhead, SimulatedStream ──▶ scheduler ──▶ AnsweringRunner (answer_revisions)

Synchronous scheduling costs nothing here but what is planned too late: the simulated clock stands still while the
scheduler computes. On a GPU it costs more.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from answer_revisions import KEPT, Answers, Revision, by_figures, recorded
from session_load import ShortPieces
from simulated_backend import SimulatedBackend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.client import SimulatedClient, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.vllm.client.arguments import NUM_DRAFT_TOKENS
from streamrag.backends.vllm.scheduler.host_memory.step_parts import parts_of
from streamrag.bench.cell import CellSettings
from streamrag.bench.virtual_time import run_virtual
from streamrag.bench.workload import Arriving, Tokens, fit_contexts, load_trace, longest_prompt, make_load
from streamrag.core import AnswerChunk, ModelInfo, Prompt, SamplingParams
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.query.answer_ahead import AnswerAhead
from streamrag.telemetry import QueryEvent
from streamrag.trace.values import TracedQuery

PROFILE = "h200-llama8b-tp2"
BUDGET = 8_192
"""Tokens a step, as for our ways in `make paper`."""

Way: TypeAlias = Literal["off", "sync", "ahead"]
"""Without drafts, as engines schedule by default: a step ahead; without drafts, as engines with `answer_ahead`
schedule; with drafts."""
WAYS: tuple[Way, ...] = ("off", "sync", "ahead")
DraftQuality: TypeAlias = Literal["figures", "recorded", "right"]
"""Whether answers change with contexts by figures, as recorded, or never, the most that a better model can give."""


@dataclass(frozen=True, slots=True)
class Load:
    """Queries that arrive, and the length of their answers."""

    workload: str
    qps: float
    num_output_tokens: int
    num_queries: int
    quality: DraftQuality = "figures"
    seed: int = 1

    @property
    def name(self) -> str:
        quality = {"figures": "", "recorded": ", as recorded", "right": ", drafts always right"}[self.quality]
        return f"{self.workload} {self.qps:g} QPS, {self.num_output_tokens} tokens{quality}"

    @property
    def revisions(self) -> Sequence[Revision]:
        """Return the changes that an answer may have with each context."""
        if self.quality == "right":
            return [KEPT]
        make = recorded if self.quality == "recorded" else by_figures
        return make("appended" if self.workload == "crawler" else "ranked")

    def queries(self, profile: StepProfile) -> tuple[TracedQuery, ...]:
        """Return the queries, the same as in `make paper`."""
        settings = CellSettings(
            "virtual",
            self.workload,
            "streaming",
            qps=self.qps,
            num_queries=self.num_queries,
            num_output_tokens=self.num_output_tokens,
            seed=self.seed,
            profile=PROFILE,
        )
        model_len = profile.provenance.get("max_model_len")
        return fit_contexts(settings, make_load(settings, load_trace(settings)), model_len).queries


@dataclass(frozen=True, slots=True)
class Row:
    """One query served in one way. Times are on the simulated clock."""

    first_context_s: float
    retrieval_end_s: float
    first_token_s: float
    last_token_s: float
    idle_s: float
    """Seconds between its first context and the end of its retrieval in which the engine computed nothing."""
    num_drafted: int
    """Tokens of the draft that the complete prompt carried."""
    is_complete: bool
    """Whether that draft was the answer."""
    num_verified: int
    num_accepted: int
    """Without the token that the model adds to each verification."""

    @property
    def first_s(self) -> float:
        """Seconds from the end of retrieval to the first token."""
        return self.first_token_s - self.retrieval_end_s

    @property
    def last_s(self) -> float:
        """Seconds from the end of retrieval to the last token."""
        return self.last_token_s - self.retrieval_end_s


@dataclass(slots=True)
class Totals:
    """What the engine did in one way."""

    busy_s: float = 0.0
    draft_s: float = 0.0
    """Seconds by which drafts made steps longer, or that steps of drafts alone took."""
    computing_s: float = 0.0
    """Seconds for which drafts computed, summed over drafts."""
    held_s: float = 0.0
    """Seconds in which others computed, and an open draft did not, summed over drafts."""
    num_drafted: int = 0
    """Tokens that drafts sampled, of all contexts."""
    end_s: float = 0.0


class AnsweringRunner(BlindRunner):
    """A runner that samples the given answer to each prompt, and verifies proposed tokens by it."""

    def __init__(self) -> None:
        super().__init__(token_at=self._answer_token)
        self.answers: dict[int, list[int]] = {}
        """Answers by the hash of their prompt."""
        self._prompts: dict[str, list[int]] = {}
        self._answer_of: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}
        """The scheduler's, by id."""
        self.num_drafted = 0
        """Tokens that drafts have sampled."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_req_ids:
            self._prompts.pop(request_id, None)
            self._answer_of.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._prompts[new.req_id] = new.prompt_token_ids or []
        output = super().execute(step)
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if tokens and self.requests[request_id].request_class == "draft":
                self.num_drafted += len(tokens)
        return output

    def _answer_token(self, request_id: str, position: int) -> int:
        answer = self._answer_of.get(request_id)
        if answer is None:
            answer = self._answer_of[request_id] = self.answers[hash(tuple(self._prompts[request_id]))]
        return answer[position]


class Meter:
    """The duration of a step by the profile, and what it was spent on."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self.requests: dict[str, Any] = {}
        """The scheduler's, by id."""
        self.totals = Totals()
        self._starts: list[float] = []
        self._steps: list[tuple[float, float, float]] = []  # start, end, and busy seconds before

    def __call__(self, step: SchedulerOutput, start_s: float) -> float:
        parts = dict(parts_of(step))
        if not parts:
            return 0.0
        totals, seconds = self.totals, self._profile.step_s(list(parts.values()))
        open_drafts = [r for r, request in self.requests.items() if request.request_class == "draft"]
        drafts = [r for r in open_drafts if r in parts]
        if drafts:
            others = [part for r, part in parts.items() if r not in drafts]
            totals.draft_s += seconds - (self._profile.step_s(others) if others else 0.0)
        totals.computing_s += seconds * len(drafts)
        totals.held_s += seconds * (len(open_drafts) - len(drafts))
        self._starts.append(start_s)
        self._steps.append((start_s, start_s + seconds, totals.busy_s))
        totals.busy_s += seconds
        totals.end_s = start_s + seconds
        return seconds

    def idle_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds between two times for which no step ran."""
        return end_s - start_s - (self._busy_before(end_s) - self._busy_before(start_s))

    def _busy_before(self, at_s: float) -> float:
        index = bisect_right(self._starts, at_s) - 1
        if index < 0:
            return 0.0
        start_s, end_s, busy_s = self._steps[index]
        return busy_s + min(at_s, end_s) - start_s


async def _ignore(event: QueryEvent) -> None:
    """Take an event of a draft."""


class Replay:
    """A load that is served in one way."""

    def __init__(self, load: Load, way: Way) -> None:
        profile = load_profile(PROFILE)
        self._load, self._way = load, way
        self._queries = load.queries(profile)
        self._revisions = load.revisions
        self._runner, self._meter = AnsweringRunner(), Meter(profile)
        longest = longest_prompt(self._queries) + load.num_output_tokens + 1
        shape = EngineShape(
            num_blocks=profile.kv_tokens // profile.block_size,
            block_size=profile.block_size,
            max_model_len=-(-longest // profile.block_size) * profile.block_size,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=256,
            is_async=way == "off",
            num_draft_tokens=0 if way == "off" else NUM_DRAFT_TOKENS,
            streamrag={"eviction": "recompute"},
        )
        engine = simulated_engine(shape, self._meter, is_stock=False, runner=self._runner)
        self._meter.requests = self._runner.requests = engine.scheduler.requests
        self._client = SimulatedClient(engine, delivery_s=profile.delivery_s)
        self._backend = SimulatedBackend(self._client, ModelInfo("simulated", ShortPieces(), shape.max_model_len))
        self._rows: dict[str, Row] = {}

    def run(self) -> tuple[dict[str, Row], Totals]:
        """Return the rows by query, and the totals."""
        run_virtual(self._play())
        rows = {i: self._with_idle(row) for i, row in self._rows.items()}
        return rows, replace(self._meter.totals, num_drafted=self._runner.num_drafted)

    def _with_idle(self, row: Row) -> Row:
        return replace(row, idle_s=self._meter.idle_s(row.first_context_s, row.retrieval_end_s))

    async def _play(self) -> None:
        async with self._client, asyncio.TaskGroup() as tasks:
            for query in self._queries:
                await asyncio.sleep(query.arrival_s - asyncio.get_running_loop().time())
                tasks.create_task(self._ask(query), name=query.query_id)

    async def _ask(self, query: TracedQuery) -> None:
        """Do for one query what a pipeline does: send each context, draft from it, and send the last with its draft."""
        clock, tail = asyncio.get_running_loop().time, Tokens().of_tail(query)
        answers = Answers(query.query_id, self._load.num_output_tokens, self._revisions)
        params = SamplingParams(max_tokens=self._load.num_output_tokens)
        drafts = AnswerAhead(self._backend, params, now=clock, emit=_ignore) if self._way == "ahead" else None
        pieces, known = aiter(Arriving(query, Tokens(), 0.0)), list[int]()
        draft: tuple[int, ...] = ()
        async with drafts or nullcontext():
            piece = await anext(pieces)
            prompt, first_context_s = piece.token_ids, clock()
            async with self._client.stream(
                query.query_id, prompt, params.max_tokens, is_complete=piece.is_complete
            ) as stream:
                while True:
                    whole = (*prompt, *(() if piece.is_complete else tail))
                    known.append(hash(whole))
                    self._runner.answers[known[-1]] = answer = answers.next()
                    if piece.is_complete:
                        break
                    if drafts is not None:
                        await drafts.begin(Prompt(whole, is_complete=True), ())
                    piece = await anext(pieces)
                    prompt = prompt + piece.token_ids if piece.is_append else piece.token_ids
                    if piece.is_complete and drafts is not None:
                        draft = await drafts.withdraw()
                    await stream.update(prompt, is_complete=piece.is_complete, hint=piece.hint, draft=draft)
                row = await self._read(stream.events(), answer)
        self._rows[query.query_id] = replace(
            row,
            first_context_s=first_context_s,
            retrieval_end_s=query.arrival_s + query.end_s,
            num_drafted=len(draft),
            is_complete=draft == tuple(answer),
        )
        for key in known:
            self._runner.answers.pop(key, None)

    async def _read(self, events: Any, expected: Sequence[int]) -> Row:
        """Read the answer, which must be that to the complete prompt."""
        clock, tokens, first_s, record = asyncio.get_running_loop().time, list[int](), None, None
        async for event in events:
            if isinstance(event, AnswerChunk):
                first_s = clock() if first_s is None and event.token_ids else first_s
                tokens += event.token_ids
                record = event.record or record
        assert tokens == list(expected), "drafts changed an answer"
        assert first_s is not None, "the answer has no tokens"
        assert record is not None, "our scheduler records every request"
        return Row(0.0, 0.0, first_s, clock(), 0.0, 0, False, record.num_verified, record.num_accepted)
