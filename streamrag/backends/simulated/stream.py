"""A client's view of one request to a simulated engine: its outputs, and its growing prompt."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

from vllm.v1.engine import EngineCoreOutput

from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.client.token_streams import record_of
from streamrag.core import AnswerChunk, Hint, Prefilled, RequestClass, common_prefix_len

Outputs: TypeAlias = "asyncio.Queue[EngineCoreOutput | Exception]"
"""Outputs of one request that have arrived, and the error if it failed."""

SendChunk: TypeAlias = Callable[[str, Sequence[int], int, PromptMessage], None]
"""Sends a chunk: the request's id, new tokens, length of the answer, and the message."""


async def next_output(outputs: Outputs) -> EngineCoreOutput:
    """Wait for the next output, and return it.

    :raises Exception: the request has failed.
    """
    output = await outputs.get()
    if isinstance(output, Exception):
        raise output
    return output


class SimulatedStream:
    """A growing prompt and its answer. Created by `SimulatedClient.stream`."""

    def __init__(
        self, send: SendChunk, request_id: str, outputs: Outputs, num_output_tokens: int, request_class: RequestClass
    ) -> None:
        self._send_chunk = send
        self._request_id = request_id
        self._outputs = outputs
        self._num_output_tokens = num_output_tokens
        self._request_class = request_class
        self._token_ids: list[int] = []
        self._num_messages = 0

    async def append(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Append tokens; with `is_complete`, have the answer sampled."""
        self._send([*self._token_ids, *token_ids], len(self._token_ids), is_complete, hint)

    async def update(
        self,
        token_ids: Sequence[int],
        *,
        is_complete: bool = False,
        hint: Hint | None = None,
        draft: Sequence[int] = (),
    ) -> None:
        """Replace the prompt; with `is_complete`, have the answer sampled, and `draft` verified."""
        new = list(token_ids)
        self._send(new, common_prefix_len(self._token_ids, new), is_complete, hint, draft)

    def _send(
        self, token_ids: list[int], num_shared: int, is_complete: bool, hint: Hint | None, draft: Sequence[int] = ()
    ) -> None:
        """Replace the prompt by `token_ids`, and send those after the first `num_shared`, which are unchanged."""
        now_s = asyncio.get_running_loop().time()
        lengths = len(token_ids), num_shared
        origin = "", self._request_class
        message = PromptMessage.of(self._num_messages, *lengths, is_complete, now_s, hint, *origin, draft)
        self._send_chunk(self._request_id, token_ids[message.num_kept :], self._num_output_tokens, message)
        self._token_ids = token_ids
        self._num_messages += 1

    async def __aiter__(self) -> AsyncGenerator[tuple[int, ...], None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, AnswerChunk) and event.token_ids:
                    yield event.token_ids

    async def events(self) -> AsyncGenerator[Prefilled | AnswerChunk, None]:
        """Yield a Prefilled when the engine has computed the newest prompt, not older ones, then the answer's chunks,
        without text. Raise the error of a failed request."""
        finish_reason = None
        while finish_reason is None:
            output = await next_output(self._outputs)
            ours = (output.kv_transfer_params or {}).get(KEY, {})
            if "chunk" not in ours:
                finish_reason = None if output.finish_reason is None else str(output.finish_reason)
                yield AnswerChunk("", tuple(output.new_token_ids), finish_reason, record_of(output))
            elif ours["chunk"] == self._num_messages - 1:  # ignored for an older prompt
                yield Prefilled(ours["num_computed"])
