"""Routers choose the replica of an engine for a query. They are pure: no clock, no network, no Ray."""

from streamrag.routing.replica_tracker import ReplicaTracker as ReplicaTracker
from streamrag.routing.replica_tracker import Report as Report
from streamrag.routing.router import Opening as Opening
from streamrag.routing.router import ReplicaState as ReplicaState
from streamrag.routing.router import Router as Router
from streamrag.routing.routers import ROUTERS as ROUTERS
from streamrag.routing.routers import make_router as make_router
