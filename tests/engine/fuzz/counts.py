"""Which of the rarer situations are met. Only counted, so that it can be seen that the fuzz comes across them."""

from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.request import StreamRequest

from .clients import Client
from .events import Chunk

if TYPE_CHECKING:
    from .run import Run

__all__ = ["count_chunk", "count_later_hits"]


def count_chunk(run: "Run", event: Chunk, client: Client) -> None:
    """`event` is about to be sent."""
    scheduler, met = run.scheduler, run.met
    stream = scheduler.requests.get(client.request_id)
    met["chunks"] += 1
    if stream is None:
        return
    is_idle = client.request_id in scheduler.plugin.queues.idle
    if not is_idle and stream.num_computed_tokens > 0:
        met["chunks in mid-prefill"] += 1
    met["chunks for idle streams"] += is_idle
    met["chunks for idle streams without KV"] += is_idle and stream.num_computed_tokens == 0
    met["chunks for preempted streams"] += stream.status == RequestStatus.PREEMPTED
    met["chunks with steps in flight"] += stream.num_in_flight_tokens > 0
    met["chunks in a pause"] += run.pause is not None
    met["chunks after a gap"] += client.is_gapped
    old, new = client.prompt, event.prompt
    met["identical prompts"] += old == new
    met["identical final prompts"] += old == new and event.is_complete
    met["prompts that shrink"] += len(new) < len(old)
    met["prompts that change token 0"] += bool(old) and old[0] != new[0]
    met["prompts that invalidate KV"] += old[: stream.num_computed_tokens] != new[: stream.num_computed_tokens]
    met["prompts that outgrow the model"] += len(new) >= run.scenario.max_model_len


def count_later_hits(run: "Run") -> None:
    """From now on."""
    later_hits, met = run.scheduler.plugin.kv_memory.later_hits, run.met
    if later_hits is None:
        return
    take = later_hits.take

    def counted(request: StreamRequest, found: Any) -> None:
        met["later hits"] += 1
        met["later hits of those that run"] += request.status == RequestStatus.RUNNING
        met["later hits with steps in flight"] += request.num_in_flight_tokens > 0
        met["later hits that give a block back"] += request.num_computed_tokens % run.scenario.block_size > 0
        met["later hits of blocks that nobody holds"] += any(block.ref_cnt == 0 for block in found)
        met["later hits after an eviction"] += request.was_evicted
        take(request, found)

    later_hits.take = counted  # type: ignore[method-assign]
