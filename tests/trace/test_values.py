import pytest

from streamrag.core import Hint
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedSkip, TracedUpdate, stretched

A = TracedChunk("a", 1)


def test_all_times_of_a_query_are_multiplied_but_not_its_arrival() -> None:
    events = (TracedAppend(1.0, A, Hint(3, 2.0)), TracedUpdate(2.0, (A,), Hint(3)))
    query = TracedQuery("1", 5.0, "why?", events, 4.0, skipped=(TracedSkip(3.0, "x", "gone"),))
    (found,) = stretched(Trace((query,), {"made": "here"}), 10).queries
    assert found.events == (TracedAppend(10.0, A, Hint(3, 20.0)), TracedUpdate(20.0, (A,), Hint(3)))
    assert (found.arrival_s, found.end_s, found.skipped[0].at_s) == (5.0, 40.0, 30.0)


@pytest.mark.parametrize("delay", [0, -1, float("nan"), float("inf")])
def test_a_delay_must_be_positive(delay: float) -> None:
    with pytest.raises(ConfigurationError, match=r"delay=.* must be"):
        stretched(Trace(()), delay)
