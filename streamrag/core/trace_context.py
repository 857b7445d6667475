"""What goes along with a query to wherever its tasks go."""

from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from types import MappingProxyType

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("streamrag_trace_headers", default=MappingProxyType({}))
"""W3C trace context headers of the query that this task works for: sent with requests to other servers, they tie those
to its trace. Empty if the query is not traced."""

conversation: ContextVar[str | None] = ContextVar("streamrag_conversation", default=None)
"""Names the conversation or session that this task works for: where engines are several, its KV lies in one."""


def conversation_of(client: str, first_question: str) -> str:
    """The same for each turn of a conversation, which brings its first question along. Tells nothing of the text."""
    return blake2b(f"{client}\n{first_question}".encode(errors="replace"), digest_size=16).hexdigest()
