"""One response from its admission to its last event, over HTTP or over WebSocket."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from streamrag.core import Turn
from streamrag.serve.connections.json_body import encode_json
from streamrag.serve.observe.observer import Interface
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.chat.query import conversation_options
from streamrag.serve.protocols.responses.conversation_stream import ConversationStream
from streamrag.serve.protocols.responses.encoder import ResponseEncoder, ServerEvent
from streamrag.serve.protocols.responses.requests import CheckedRequest
from streamrag.serve.protocols.responses.states import State
from streamrag.serve.service import Service, conversation_of
from streamrag.telemetry import Answered, QueryEvent

SendEvent: TypeAlias = Callable[[ServerEvent], Awaitable[None]]


@asynccontextmanager
async def query_events(
    service: Service, caller: Caller, interface: Interface, request: CheckedRequest
) -> AsyncIterator[AsyncIterator[QueryEvent]]:
    """Admit a request and give its events: of the service's retrieval and answer, or of the conversation alone,
    streamed as one complete prompt."""
    if request.retrieves:
        question, options = conversation_options(request.conversation, "input", request.params, service.template)
        async with service.events(caller, interface, question, **options) as events:
            yield events
        return
    async with service.open(
        caller,
        interface,
        request.question,
        max_tokens=request.params.max_tokens,
        deadline_s=service.limits.deadline_s,
    ) as opened:
        conversation_id = conversation_of(caller, request.turns, request.question)
        stream = ConversationStream(service, opened, request.params, conversation_id)
        await stream.extend(request.conversation, is_complete=True)
        async with aclosing(stream.events()) as events:
            yield events


class ResponseRun:
    """A run of one response: sends its events as they occur, and passes its state to `keep` once it is complete."""

    def __init__(
        self,
        request: CheckedRequest,
        model: str,
        base_url: str | None = None,
        *,
        keep: Callable[[State], None] | None = None,
        send: SendEvent | None = None,
    ) -> None:
        self.request = request
        self.encoder = ResponseEncoder(request, model, base_url)
        self.send = send
        self._on_complete = keep
        self._last: list[ServerEvent] = []

    async def run(self, service: Service, caller: Caller, interface: Interface) -> None:
        """Answer the request and send all events. On an error, the caller must end the response with `encoder.fail`."""
        async with query_events(service, caller, interface, self.request) as events:
            if not self.request.retrieves:
                await self.begin()
            await self.follow(events)
        await self.finish()

    async def begin(self) -> None:
        """Send the events of an admitted request."""
        await self._send_all(self.encoder.begin())

    async def follow(self, events: AsyncIterator[QueryEvent]) -> None:
        """Send the encoded events, after `begin` if needed; `keep` the complete answer, whose events `finish` sends."""
        async for event in events:
            if not self.encoder.has_begun:
                await self.begin()
            encoded = self.encoder.encode(event)
            if isinstance(event, Answered):
                self.keep(Turn("assistant", event.answer.text))
                self._last = encoded
            else:
                await self._send_all(encoded)

    async def finish(self) -> None:
        """Send the last events. Call this after the query's place is released, as the client may then send another."""
        await self._send_all(self._last)

    async def complete_prepared(self, num_tokens: int | None) -> None:
        """Send all events of a response without an answer, whose prompt has `num_tokens`."""
        events = [*self.encoder.begin(), *self.encoder.complete_prepared(num_tokens)]
        self.keep()
        await self._send_all(events)

    def keep(self, *more: Turn) -> None:
        """Pass the response as JSON, and the conversation, ended by these turns, to the callback, if there is one."""
        if self._on_complete is not None:
            request = self.request
            response = encode_json(self.encoder.response).encode()
            self._on_complete(State(request.id, response, (*request.turns, *more), request.brings_context))

    async def _send_all(self, events: list[ServerEvent]) -> None:
        """Send events in order; without `send`, as for a response in one piece, they are only encoded."""
        if self.send is not None:
            for event in events:
                await self.send(event)
