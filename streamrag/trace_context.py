"""Context variables of a query that its tasks inherit."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("streamrag_trace_headers", default=MappingProxyType({}))
"""W3C trace context headers to send with requests to other servers; empty if the query is not traced."""
