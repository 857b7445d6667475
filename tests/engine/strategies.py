"""Requests for property tests."""

from typing import get_args

from hypothesis import strategies as st

from streamrag.core import RequestClass
from streamrag.engine import ClassPolicy, Policy, RequestView, make_policy

BLOCK_SIZE = 16
SPECS = ["arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(1)", "k_lpm(3)", "k_lpm(inf)", "srpf", "srpf(0.25)"]
SPECS += ["fcfs in classes", "k_lpm(3) in classes", "srpf in classes"]


def policy_of(spec: str) -> Policy:
    """The policy of one of `SPECS`."""
    name, in_classes, _ = spec.partition(" in classes")
    return ClassPolicy(make_policy(name), 2.0) if in_classes else make_policy(name)


@st.composite
def views(draw: st.DrawFn, name: str = "r0", *, is_idle: bool = False) -> RequestView:
    num_tokens = draw(st.integers(1, 300))
    num_computed = num_tokens if is_idle else draw(st.integers(0, num_tokens))
    arrival_s = draw(st.integers(0, 5))
    is_complete = not is_idle and draw(st.booleans())
    return RequestView(
        request_id=name,
        arrival_s=arrival_s,
        last_chunk_s=arrival_s + draw(st.integers(0, 5)),
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        num_blocks=-(-num_computed // BLOCK_SIZE),
        num_cached_tokens=0 if num_computed else draw(st.integers(0, num_tokens - 1)),
        is_complete=is_complete,
        has_output=is_complete and draw(st.integers(0, 3)) == 0,
        is_idle=is_idle,
        is_running=not is_idle and draw(st.booleans()),
        request_class=draw(st.sampled_from(get_args(RequestClass))),
        since_s=arrival_s + draw(st.integers(0, 5)),
        num_step_tokens=draw(st.none() | st.integers(1, 100)),
        adapter_id=draw(st.none() | st.integers(1, 3)),
    )


@st.composite
def view_lists(draw: st.DrawFn, max_size: int = 8, *, is_idle: bool = False) -> list[RequestView]:
    num = draw(st.integers(0, max_size))
    prefix = "i" if is_idle else "r"
    return [draw(views(f"{prefix}{i}", is_idle=is_idle)) for i in range(num)]
