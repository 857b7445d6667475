"""Outputs of the plugin to clients, beside vLLM's own.

vLLM's client expects one finish per chunk. Those of chunks that are not the last carry no token: acknowledgements.
"""

from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.scheduler.request import StreamRequest


class Outbox:
    """Outputs that wait to be sent with those of the next step."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, EngineCoreOutput]] = []

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def acknowledge(self, stream: StreamRequest, *, is_waiting: bool = False) -> None:
        """Send the client the finishes that it expects for the chunks so far."""
        for index in range(stream.num_acknowledged, stream.num_messages):
            ours: dict[str, Any] = {"chunk": index, "num_computed": stream.num_computed_tokens}
            if is_waiting:
                ours["is_waiting"] = True
            self._send(stream, FinishReason.STOP, ours)
        stream.num_acknowledged = stream.num_messages

    def acknowledge_waiting(self, stream: StreamRequest) -> None:
        """Acknowledge the chunks of a stream that waits for memory, for nobody knows how long: a client that sends its
        next chunk only after this one must not wait for that."""
        if stream.num_in_flight_tokens <= stream.num_stale_output_tokens:
            self.acknowledge(stream, is_waiting=True)

    def send_error(self, stream: StreamRequest, problem: str) -> None:
        self._send(stream, FinishReason.ERROR, {"error": problem, "record": msgspec.to_builtins(stream.record)})

    def _send(self, request: StreamRequest, reason: FinishReason, ours: dict[str, Any]) -> None:
        output = EngineCoreOutput(request.request_id, [], finish_reason=reason, kv_transfer_params={KEY: ours})
        self._outputs.append((request.client_index, output))

    def discard(self, request_id: str) -> None:
        """Drop what is still to be sent to an earlier request of this id."""
        self._outputs = [(client, output) for client, output in self._outputs if output.request_id != request_id]

    def add_to(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Add all that waits to the outputs of a step, by client, and return them."""
        waiting, self._outputs = self._outputs, []
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for client_index, output in waiting:
            by_client.setdefault(client_index, []).append(output)
        for client_index, sent in by_client.items():
            of_client = outputs.setdefault(client_index, EngineCoreOutputs())
            # Before the tokens: what ended a chunk came before what the next one brings.
            of_client.outputs = sent + of_client.outputs
        return outputs
