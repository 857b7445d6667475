"""Outputs of the plugin to clients, in addition to vLLM's own.

vLLM's client expects one finish per chunk. For every chunk but the last we send a finish without tokens: an
acknowledgement.
"""

from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.scheduler.request import StreamRequest


class Outbox:
    """A queue of outputs that are sent with those of the next step."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, EngineCoreOutput]] = []

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def acknowledge(self, stream: StreamRequest, *, is_waiting: bool = False) -> None:
        """Queue a finish without tokens for each chunk not yet acknowledged, with the number of computed tokens."""
        for index in range(stream.num_acknowledged, stream.num_messages):
            ours: dict[str, Any] = {"chunk": index, "num_computed": stream.num_computed_tokens}
            if is_waiting:
                ours["is_waiting"] = True
            self._send(stream, FinishReason.STOP, ours)
        stream.num_acknowledged = stream.num_messages

    def acknowledge_waiting(self, stream: StreamRequest) -> None:
        """Acknowledge the chunks of a stream that waits for memory, unless a step in flight computes its prompt.

        A client may send its next chunk only after the acknowledgement, and must not wait for the memory.
        """
        if stream.num_in_flight_tokens <= stream.num_stale_output_tokens:
            self.acknowledge(stream, is_waiting=True)

    def send_error(self, stream: StreamRequest, problem: str) -> None:
        self._send(stream, FinishReason.ERROR, {"error": problem, "record": msgspec.to_builtins(stream.record)})

    def _send(self, request: StreamRequest, reason: FinishReason, ours: dict[str, Any]) -> None:
        output = EngineCoreOutput(request.request_id, [], finish_reason=reason, kv_transfer_params={KEY: ours})
        self._outputs.append((request.client_index, output))

    def discard(self, request_id: str) -> None:
        """Drop the outputs for an earlier request of this id."""
        self._outputs = [(client, output) for client, output in self._outputs if output.request_id != request_id]

    def add_to(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Move all queued outputs in front of the outputs of a step, by client index, and return the latter."""
        queued, self._outputs = self._outputs, []
        for client_index in dict(queued):
            client_outputs = outputs.setdefault(client_index, EngineCoreOutputs())
            # Before the tokens: the acknowledgement of a chunk precedes the tokens that follow the next chunk.
            client_outputs.outputs = [
                output for index, output in queued if index == client_index
            ] + client_outputs.outputs
        return outputs
