"""vLLM's NixlConnector for a decode lane, which uses no KV that came too late.

A lane that is stopped for longer than the lease, and goes on, reads reused blocks, with the KV of other prompts. vLLM
would answer from it, and keep it in the prefix cache.

    prefill lane   end of a prefill ─── lease: blocks are kept ───────────────────▶ blocks are reused
    decode lane    a read that ends here: KV is used ──▶ READ_BY_KEY ──▶ here: vLLM computes the prompt
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger

from streamrag.support.clock import seconds_since_boot

logger = init_logger(__name__)


class NixlConnector(NixlPullConnector):
    """A connector under vLLM's name for it, by which vLLM's configuration checks what NIXL needs."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which transfers ended since the last step. Reads that ended too late have failed."""
        reads = dict(self.connector_worker._recving_metadata)
        results = super().get_transfer_results(finished_req_ids)
        now_s = seconds_since_boot()  # after the data have come, so a process stopped before is noticed
        for request_id in results.finished_recving:
            read_by_s = reads[request_id].remote.blocks_expiry_time
            if read_by_s is None or now_s > read_by_s:  # without a time, the request is not from `DisaggregatedBackend`
                logger.warning("The KV for %s came too late to be trusted: the prompt is computed.", request_id)
                results.failed_recving.add(request_id)
        return results
