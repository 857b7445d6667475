"""Context variables of a query that its tasks inherit."""

from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from types import MappingProxyType

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("streamrag_trace_headers", default=MappingProxyType({}))
"""W3C trace context headers to send with requests to other servers; empty if the query is not traced."""

conversation: ContextVar[str | None] = ContextVar("streamrag_conversation", default=None)
"""Id of the conversation or session that this task works for, by which a router finds the engine that holds its KV."""


def conversation_of(client: str, first_question: str) -> str:
    """Return an id that all turns of a conversation share: a hash that reveals nothing of the text."""
    return blake2b(f"{client}\n{first_question}".encode(errors="replace"), digest_size=16).hexdigest()
