"""The newest of a query's prompts, for backends that may send it more than once, or skip others."""

import asyncio
from collections.abc import AsyncIterator

from streamrag.core import Prompt
from streamrag.errors import BackendError
from streamrag.support.tasks import cancel_and_wait


class NewestPrompt:
    """Reads a query's prompts in a task, and keeps the newest. `aclose` ends the task.

    Methods that wait raise an error of `prompts`, and BackendError if these end without a complete one.
    """

    def __init__(self, prompts: AsyncIterator[Prompt]) -> None:
        self.prompt: Prompt | None = None
        self.number = 0  # number of the newest prompt, from 1; 0 before the first
        self._has_more = asyncio.Event()
        self.pulling = asyncio.create_task(self._pull(prompts), name="pull prompts")
        self.pulling.add_done_callback(lambda task: self._has_more.set())

    async def _pull(self, prompts: AsyncIterator[Prompt]) -> None:
        """Keep each prompt as the newest, up to the complete one; raise BackendError if there is no complete one."""
        async for prompt in prompts:
            self.prompt = prompt
            self.number += 1
            self._has_more.set()
            if prompt.is_complete:
                return
        raise BackendError("the prompts ended without a complete one")

    async def wait_for_newer(self, number: int) -> Prompt:
        """Wait until the number of the newest prompt is greater than `number`, and return this prompt."""
        while self.number <= number:
            if self.pulling.done():
                self.pulling.result()
            self._has_more.clear()
            await self._has_more.wait()
        assert self.prompt is not None
        return self.prompt

    def find_prefilled_data(self, num_prefilled: int) -> Prompt | None:
        """Return the newest prompt if it is a session's data and all but one token are prefilled, so that the session's
        questions should be routed to its KV. Else return None."""
        prompt = self.prompt
        if prompt is not None and prompt.request_class == "stream" and num_prefilled >= len(prompt.token_ids) - 1:
            return prompt
        return None

    async def pause(self, duration_s: float) -> None:
        """Wait for `duration_s`, or less if the complete prompt comes or reading fails meanwhile."""
        if self.pulling.done():
            await asyncio.sleep(duration_s)
        else:
            await asyncio.wait([self.pulling], timeout=duration_s)
        if self.pulling.done():
            self.pulling.result()

    async def aclose(self) -> None:
        """Stop reading prompts, and wait until the task has ended."""
        await cancel_and_wait([self.pulling])
