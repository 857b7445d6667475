"""`POST /v1/ask`: one question, answered by every event of its query as SSE.

    retrieval_started, chunk_arrived, context_changed, ..., tokens_generated, ..., answered

The last event is `answered`, or `error`.
"""

from typing import Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.query.options import MAX_DRAFT, QueryOptions
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel, read_body
from streamrag.serve.connections.sse import Write
from streamrag.serve.protocols.chat.requests import Message
from streamrag.serve.protocols.event_encoder import respond_with_events, write_events
from streamrag.serve.request_fields import SAMPLING, parse_turn, sampling
from streamrag.serve.service import Service

QUERY_FIELDS = {"max_context_tokens", "deadline_s", "reserve_fraction", "overlap", "answer_ahead", "draft"}


class QueryRequest(StrictModel):
    """The query options that a client may set."""

    system: str | None = None
    history: list[Message] = Field(default=[], max_length=1000)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    max_context_tokens: int | None = None
    deadline_s: float | None = None
    reserve_fraction: float | None = None
    overlap: bool | Literal["auto"] | None = None
    answer_ahead: bool | None = None
    draft: str | None = Field(default=None, max_length=MAX_DRAFT)

    def query_options(self, service: Service) -> QueryOptions:
        """Return the pipeline's options: sampling parameters and history, and of the others those that the client set.

        A `system` follows the service's own. Raises RequestError or ConfigurationError for invalid options.
        """
        params = sampling(service.params, **self.model_dump(include=SAMPLING))
        history = [parse_turn(each.role, each.content, f"history.{i}") for i, each in enumerate(self.history)]
        options = self.model_dump(include=QUERY_FIELDS, exclude_none=True)
        if self.system:
            options["system"] = service.system_text(self.system)
        return cast(QueryOptions, {"params": params, "history": history, **options})


class AskRequest(QueryRequest):
    question: str


def routes(service: Service) -> list[Route]:
    """Return `POST /v1/ask`, which streams all events of a query as SSE."""

    async def ask(request: Request) -> Response:
        body = await read_body(request, AskRequest)
        options = body.query_options(service)

        async def produce(write: Write) -> None:
            async with service.events(request.scope[CALLER], "ask", body.question, **options) as events:
                await write_events(write, events)

        return await respond_with_events(request, service, produce)

    return [Route("/v1/ask", ask, methods=["POST"])]
