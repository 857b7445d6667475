"""The memory that an order of requests takes."""

import weakref

import pytest
from strategies import SPECS, policy_of

from streamrag.engine import RequestView


class WatchedId(str):
    """A request id that tells whether it is still referenced."""


@pytest.mark.parametrize("spec", SPECS)
def test_an_order_forgets_requests_that_are_gone(spec: str) -> None:
    policy, alive = policy_of(spec), weakref.WeakSet[WatchedId]()
    for step in range(300):
        ids = [WatchedId(f"{step}-{number}") for number in range(10)]
        alive.update(ids)
        classes = ["pool", "stream"] if "classes" in spec else ["pool"]
        views = [RequestView(name, step, step, 100, request_class=each) for name in ids for each in classes]  # type: ignore[arg-type]
        policy.order(views, float(step))
    assert len(alive) < 500, "of 3,000"
