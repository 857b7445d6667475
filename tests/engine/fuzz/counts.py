"""Which of the rarer situations a chunk meets. Only counted, so that it can be seen that the fuzz comes across them."""

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from .clients import Client
from .events import Chunk

if TYPE_CHECKING:
    from .run import Run

__all__ = ["count_chunk"]


def count_chunk(run: "Run", event: Chunk, client: Client) -> None:
    """`event` is about to be sent."""
    scheduler, met = run.scheduler, run.met
    stream = scheduler.requests.get(client.request_id)
    met["chunks"] += 1
    if stream is None:
        return
    is_idle = client.request_id in scheduler.idle
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
