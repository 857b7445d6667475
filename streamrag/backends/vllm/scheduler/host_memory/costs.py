"""Costs of decisions about KV in host memory: expected and observed.

    resumed ─▶ on_resume ─▶ steps that recompute │ reports of copies ─▶ RestoreRecord.observed_s
    evicted ─▶ on_saves_sent, in steps that overwrite ─▶ reports of copies ─▶ PreemptionRecord.save_s

A report gives only the number of blocks copied; copies in one direction end in the order in which they were sent.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.backends.vllm.facts import EngineFacts, engine_facts
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine.costs.default_profile import check_fits, decoder_shape, default_profile
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import ModelShape, StepPart, StepProfile
from streamrag.engine.recompute_or_swap import CostComparison
from streamrag.records import RestoreRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Match(NamedTuple):
    """Blocks in host memory of a request that could run in this step."""

    start: int  # the first block after the prefix hit
    num_blocks: int  # number of blocks from `start` on
    comparison: CostComparison | None  # the choice between loading and computing them; None without blocks
    num_tokens: int  # number of tokens to load


@dataclass(slots=True)
class _Entry:
    """The position of a record in a log. The record is updated as more becomes known."""

    log: RequestLog
    index: int


@dataclass(slots=True)
class _Recomputation:
    entry: _Entry
    done: int  # tokens before this one are computed
    end: int
    observed_s: float = 0.0


@dataclass(slots=True)
class _CopyQueue:
    """Copies that were sent and have not ended, and the record that each belongs to."""

    sent: deque[tuple[_Entry | None, int]] = field(default_factory=deque)

    def pop_ended(self, num_blocks: int, seconds: float) -> Iterator[tuple[_Entry, float]]:
        """Remove the oldest `num_blocks` blocks. Yield each record among them with its share of `seconds`."""
        num_left = num_blocks
        while num_left > 0 and self.sent:
            entry, num = self.sent.popleft()
            if num > num_left:
                self.sent.appendleft((entry, num - num_left))
                num = num_left
            num_left -= num
            if entry is not None:
                yield entry, seconds * num / num_blocks


class HostCosts:
    """Completes the preemption and restore records of unfinished requests, and reports observations to the price."""

    def __init__(self, price: Price | None, block_size: int) -> None:
        self.price = price  # None if costs are not compared: expected costs are 0 then
        self._block_size = block_size
        self._recomputing: dict[str, _Recomputation] = {}
        self._out, self._in = _CopyQueue(), _CopyQueue()

    def on_chunk(self, num_computed: int, num_valid: int) -> None:
        """Record that a chunk left `num_valid` of `num_computed` computed tokens valid."""
        if self.price is not None:
            self.price.observe_chunk(num_computed, num_valid)

    def on_resume(self, request: StreamRequest, match: Match, now_s: float) -> None:
        """Log a restore, with its expected cost, at each start of a request that was ever evicted.

        A restore loads or recomputes; its duration is logged at its end. Ignores a request without a full block to
        restore behind its prefix hit.
        """
        if not request.was_evicted:
            return
        start, num_blocks, comparison, _ = match
        if comparison is None:
            num_blocks = request.log.num_ever_computed // self._block_size - start  # partial blocks are never cached
            if num_blocks <= 0:
                return
            recompute_s = self.price.recompute_s(start, num_blocks) if self.price is not None else 0.0
            record = RestoreRecord(now_s, "recompute", num_blocks * self._block_size, recompute_s, None, None)
        else:
            choice, recompute_s, swap_s = comparison.choice, comparison.recompute_s, comparison.swap_s
            record = RestoreRecord(now_s, choice, num_blocks * self._block_size, recompute_s, swap_s, None)
        entry = _Entry(request.log, len(request.log.restores))
        request.log.restores.append(record)
        if record.choice == "swap":
            self._in.sent.append((entry, num_blocks))
        else:
            first = start * self._block_size
            self._recomputing[request.request_id] = _Recomputation(entry, first, first + record.num_tokens)

    def on_saves_sent(self, request: StreamRequest, num_blocks: int, num_together: int) -> None:
        """Record that blocks of an evicted request are sent, and their share of the expected time of `num_together`."""
        together_s = self.price.save_s(num_together) if self.price is not None else 0.0
        entry = _Entry(request.log, len(request.log.preemptions) - 1)
        request.log.on_saves_sent(entry.index, num_blocks * self._block_size, together_s * num_blocks / num_together)
        self._out.sent.append((entry, num_blocks))

    def on_write_through(self, num_blocks: int) -> None:
        """Record that blocks that no request has lost are sent to host memory."""
        self._out.sent.append((None, num_blocks))

    def on_sent(self, num_out: int, num_in: int, now_s: float) -> None:
        """Tell the price that a step queued copies of `num_out` blocks out and of `num_in` blocks in."""
        if self.price is not None:
            self.price.observe_sent(num_out, num_in, now_s)

    def on_step_end(
        self, parts: Sequence[tuple[str, StepPart]], duration_s: float, copies_s: float, *, waited_for_copies: bool
    ) -> None:
        """Report a step and its copies to the price; add its time, by share, to recomputations, and log ended ones.

        Recomputations that were evicted again, or whose prompt has changed, are dropped without a duration.
        """
        computed = [part for _, part in parts]
        compute_s = duration_s
        if self.price is not None:
            self.price.observe_step(computed, duration_s, copies_s, waited_for_copies=waited_for_copies)
            if not self.price.is_overlapped:
                compute_s -= copies_s
        for index, (request_id, (num_new, num_before)) in enumerate(parts if self._recomputing else ()):
            known = self._recomputing.get(request_id)
            if known is None:
                continue
            if num_before != known.done:  # it was evicted again, or its prompt has changed
                del self._recomputing[request_id]
                continue
            known.done = min(num_before + num_new, known.end)
            known.observed_s += self._share(computed, index, known.done - num_before) * compute_s
            if known.done == known.end:
                del self._recomputing[request_id]
                known.entry.log.on_restored(known.entry.index, known.observed_s)

    def on_copied(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Add the seconds of the oldest copies sent, which have ended, to the records that these belong to, by share.

        Reports the numbers and seconds to the price, too.
        """
        for entry, seconds in self._out.pop_ended(num_out, out_s):
            entry.log.on_saves_ended(entry.index, seconds)
        for entry, seconds in self._in.pop_ended(num_in, in_s):
            entry.log.on_restored(entry.index, seconds)
        if self.price is not None:
            self.price.observe_copies(num_out, out_s, num_in, in_s)

    def on_failed_copies(self) -> None:
        """Discard the outstanding copies: after a failure, counts no longer tell which ones have ended."""
        self._out.sent.clear()
        self._in.sent.clear()

    def on_finish(self, request_id: str) -> None:
        self._recomputing.pop(request_id, None)

    def _share(self, parts: Sequence[StepPart], index: int, num_tokens: int) -> float:
        """Return the share of a step's time for `num_tokens` of part `index`; by token count without prices."""
        if self.price is not None:
            return self.price.share_of_step(parts, index, num_tokens)
        return num_tokens / sum(num_new for num_new, _ in parts)


def parts_of(step: SchedulerOutput) -> Iterator[tuple[str, StepPart]]:
    """Yield (request id, (tokens that the step computes, tokens before them)) in vLLM's order: new requests first."""
    counts = step.num_scheduled_tokens
    for new in step.scheduled_new_reqs:
        yield new.req_id, (counts[new.req_id], new.num_computed_tokens)
    cached = step.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, (counts[request_id], num_computed)


def make_price_of_engine(options: EngineOptions, config: "VllmConfig", block_bytes: int) -> Price | None:
    """Return the expected costs of KV on an engine; None with eviction="swap", which compares none.

    :raises ConfigurationError: the profile does not exist, lacks copy times, or belongs to another engine.
    """
    if options.eviction == "swap":
        return None
    profile, budget = _find_profile(options, config, block_bytes), config.scheduler_config.max_num_batched_tokens
    return Price(profile, config.cache_config.block_size, budget)


def _assume_model_shape(facts: EngineFacts, config: "VllmConfig") -> ModelShape:
    """Return the shape of a dense transformer with a gated feed-forward part: for other models a first estimate."""
    model, text = config.model_config, config.model_config.hf_text_config
    return decoder_shape(
        facts.model,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocab_size=text.vocab_size,
        num_layers=facts.num_layers,
        num_heads=model.get_num_attention_heads(config.parallel_config) * facts.tensor_parallel_size,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=facts.head_dim,
        dtype_bytes=model.dtype.itemsize,
    )


def _find_profile(options: EngineOptions, config: "VllmConfig", block_bytes: int) -> StepProfile:
    """Return the profile that the options name or, without a name, one from data sheets.

    Raises ConfigurationError if the named one does not exist or, except for simulated engines, does not fit.
    """
    facts = engine_facts(config)
    if options.profile is None:
        return default_profile(
            _assume_model_shape(facts, config),
            device="cuda" if facts.is_cuda else "cpu",
            device_name=facts.device if facts.is_cuda else "",
            num_cores=facts.num_cores,
            tensor_parallel_size=facts.tensor_parallel_size,
            block_size=facts.block_size,
            is_async=config.scheduler_config.async_scheduling,
        )
    profile = load_profile(options.profile)
    if options.num_host_blocks is None:  # set only for simulated engines, whose profile is of another host
        check_fits(
            profile,
            block_size=facts.block_size,
            tensor_parallel_size=facts.tensor_parallel_size,
            block_bytes=block_bytes,
            is_overlapped=facts.is_cuda,
            model=facts.model,
        )
    return profile
