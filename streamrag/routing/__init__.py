"""Which replica of an engine a query goes to. Pure: no clock, no network, no Ray."""

from streamrag.routing.books import Books, Report
from streamrag.routing.router import Opening, ReplicaState, Router
from streamrag.routing.routers import ROUTERS, make_router

__all__ = ["ROUTERS", "Books", "Opening", "ReplicaState", "Report", "Router", "make_router"]
