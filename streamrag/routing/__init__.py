"""Which replica of an engine a query goes to. Pure: no clock, no network, no Ray."""

from streamrag.routing.router import Opening, ReplicaState, Router

__all__ = ["Opening", "ReplicaState", "Router"]
