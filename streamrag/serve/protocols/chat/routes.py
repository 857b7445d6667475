"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import encode_json, read_body
from streamrag.serve.connections.sse import EMPTY_LINES, Write, format_event, respond, unless_disconnected
from streamrag.serve.failures import Failure
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.chat.encoder import ChatEncoder
from streamrag.serve.protocols.chat.query import chat_query
from streamrag.serve.protocols.chat.requests import ChatRequest, ToollessChatRequest
from streamrag.serve.protocols.event_encoder import wait_for_answer
from streamrag.serve.service import Service
from streamrag.telemetry import RetrievalStarted


def routes(service: Service) -> list[Route]:
    """Return `POST /v1/chat/completions`, which answers whole, or as SSE with [DONE] at the end if `stream` is set."""

    async def chat(request: Request) -> Response:
        """Check the request, answer it, and respond with one completion or a stream of chunks."""
        caller: Caller = request.scope[CALLER]
        body = await read_body(request, ToollessChatRequest if service.ignores_tools else ChatRequest)
        service.ignored_fields.note(caller.client, body.check(service.chat_template))
        question, source, options, reader = chat_query(service, body)
        encoder = ChatEncoder(body.model or service.model_name, reader, service.base_url)
        query = service.events(caller, "chat", question, source=source, **options)
        if not body.stream:
            answer = await unless_disconnected(wait_for_answer(query, encoder.delta), request.receive)
            return JSONResponse(encoder.whole(answer))
        with_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(write: Write) -> None:
            async with query as events:
                async for event in events:
                    if isinstance(event, RetrievalStarted):
                        await write(EMPTY_LINES)  # begins the response, with nothing to take for the first token
                    for chunk in encoder.chunks(event, with_usage=with_usage):
                        await write(format_event(encode_json(chunk)))
            await write(format_event("[DONE]"))

        timeout_s = service.limits.send_timeout_s
        return await respond(request, produce, on_failure=encode_failure, send_timeout_s=timeout_s, ping=EMPTY_LINES)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def encode_failure(failure: Failure) -> Sequence[bytes]:
    """Return the last event of a failed stream, for which OpenAI's client raises APIError."""
    return [format_event(failure.json())]
