"""The parts of a step of vLLM: how many tokens it computes for each request."""

from collections.abc import Iterator

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.engine.costs.step_profiles import StepPart


def parts_of(step: SchedulerOutput) -> Iterator[tuple[str, StepPart]]:
    """Yield (request id, (tokens that the step computes, tokens before them)) in vLLM's order: new requests first."""
    counts = step.num_scheduled_tokens
    for new in step.scheduled_new_reqs:
        yield new.req_id, (counts[new.req_id], new.num_computed_tokens)
    cached = step.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, (counts[request_id], num_computed)
