"""A client's view of one request to a simulated engine: its outputs, and its growing prompt."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

from vllm.v1.engine import EngineCoreOutput

from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.client.token_streams import record_of
from streamrag.core import AnswerChunk, Hint, Prefilled, Prompt, RequestClass, common_prefix_len

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
        self._prompt = Prompt((), request_class=request_class)
        self._num_messages = 0

    async def append(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Append tokens; with `is_complete`, have the answer sampled."""
        await self.update((*self._prompt.token_ids, *token_ids), is_complete=is_complete, hint=hint)

    async def update(
        self,
        token_ids: Sequence[int],
        *,
        is_complete: bool = False,
        hint: Hint | None = None,
        draft: Sequence[int] = (),
    ) -> None:
        """Replace the prompt; with `is_complete`, have the answer sampled, and `draft` verified."""
        old, new = self._prompt.token_ids, tuple(token_ids)
        options: dict[str, Any] = {"is_complete": is_complete, "hint": hint, "draft": tuple(draft)}
        self._prompt = replace(self._prompt, token_ids=new, num_shared=common_prefix_len(old, new), **options)
        message = PromptMessage.of(self._prompt, self._num_messages, asyncio.get_running_loop().time())
        self._send_chunk(self._request_id, new[message.num_kept :], self._num_output_tokens, message)
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
