"""One response from its admission to its last event, whichever way it is sent."""

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import aclosing, asynccontextmanager

from streamrag.asked import QueryOptions
from streamrag.core import Turn
from streamrag.serve.interfaces.responses.brought import Brought
from streamrag.serve.interfaces.responses.requests import Asked
from streamrag.serve.interfaces.responses.states import State, StateStore
from streamrag.serve.interfaces.responses.writing import ServerEvent, Writer
from streamrag.serve.observe.observer import Interface
from streamrag.serve.open_queries import Caller
from streamrag.serve.request_fields import split_turns
from streamrag.serve.service import Service, first_question
from streamrag.serve.wire import json_of
from streamrag.telemetry import Answered, Event

Send = Callable[[ServerEvent], Awaitable[None]]


@asynccontextmanager
async def answering(
    service: Service, caller: Caller, interface: Interface, asked: Asked
) -> AsyncIterator[AsyncIterator[Event]]:
    """What happens while it is answered, from the service's retrieval or from the conversation alone.

    :raises RefusedError: there is no place for it.
    :raises StreamRagError: as `Service.events` does.
    """
    if asked.retrieves:
        system, history, question = split_turns(asked.whole, "input")
        options = QueryOptions(history=history, params=asked.params)
        if system:
            options["system"] = service.system_text(system)
        async with service.events(caller, interface, question, **options) as events:
            yield events
        return
    async with service.open(
        caller,
        interface,
        asked.question,
        max_tokens=asked.params.max_tokens,
        deadline_s=service.limits.deadline_s,
        first_question=first_question(asked.turns),
    ) as opened:
        brought = Brought(service, opened, asked.params)
        await brought.extend(asked.whole, is_complete=True)
        async with aclosing(brought.events()) as events:
            yield events


async def unsent(event: ServerEvent) -> None:
    """For whoever wants no stream."""


class Answering:
    """Sends the events of a response, and keeps it once it is whole, for `owner`, of `client`'s, if there is one."""

    def __init__(
        self,
        asked: Asked,
        model: str,
        states: StateStore,
        owner: Hashable | None,
        client: str,
        send: Send = unsent,
    ) -> None:
        self.asked = asked
        self.writer = Writer(asked, model)
        self._last: list[ServerEvent] = []
        self._states = states
        self._owner = owner
        self._client = client
        self.send = send

    async def run(self, service: Service, caller: Caller, interface: Interface) -> None:
        """From its admission to its end.

        :raises StreamRagError: as `answering` does; what was begun is to be ended with `Writer.failed`.
        """
        async with answering(service, caller, interface, self.asked) as events:
            if not self.asked.retrieves:
                await self.begin()
            await self.follow(events)
        await self.finish()

    async def begin(self) -> None:
        """Say that it was let in."""
        for each in self.writer.begin():
            await self.send(each)

    async def follow(self, events: AsyncIterator[Event]) -> None:
        """Send what these events add, up to the last."""
        async for event in events:
            if not self.writer.has_begun:
                await self.begin()
            written = self.writer.write(event)
            if isinstance(event, Answered):
                self._keep(Turn("assistant", event.answer.text))
                self._last = written
                continue
            for each in written:
                await self.send(each)

    async def finish(self) -> None:
        """Send what the answer's end adds, once its place is free: the client may ask again as soon as it knows."""
        for each in self._last:
            await self.send(each)

    async def prepared(self, num_tokens: int) -> None:
        """Send the whole of one that has no answer."""
        begun = self.writer.begin()
        ended = self.writer.prepared(num_tokens)
        self._keep()
        for each in (*begun, *ended):
            await self.send(each)

    def _keep(self, *more: Turn) -> None:
        if self._owner is not None:
            turns = (*self.asked.turns, *more)
            response = json_of(self.writer.response).encode()
            state = State(self.asked.id, response, turns, self.asked.brings_context)
            self._states.add(self._owner, state, client=self._client)
