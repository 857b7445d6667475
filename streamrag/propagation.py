"""Headers that tie what is asked of other servers for a query to that query's trace: W3C's trace context."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("streamrag_trace_headers", default=MappingProxyType({}))
"""Of the query that this task works for; none if nobody traces it."""
