from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamrag.routing import ReplicaState, ReplicaTracker, Report


def test_a_query_counts_as_queued_until_its_first_token_and_as_open_until_it_ends():
    tracker = ReplicaTracker()
    tracker.routed("q", "a", 100)
    assert tracker.states(["a"]) == [ReplicaState("a", num_queued=1, num_open=1, num_new_tokens=100)]
    tracker.first_token("q")
    tracker.first_token("q")
    assert tracker.states(["a"]) == [ReplicaState("a", num_open=1)]
    tracker.ended("q")
    tracker.ended("q")
    assert tracker.states(["a"]) == [ReplicaState("a")]


def test_the_report_of_a_replica_stands_beside_the_fresh_counts():
    tracker = ReplicaTracker()
    tracker.routed("q", "a", 7)
    tracker.reported("a", Report(32, 0.5, 0.25, 900, 10_000, 8_000.0), now_s=3.5)
    expected = ReplicaState("a", 1, 1, 32, 7, 0.5, 0.25, 900, 10_000, 8_000.0, 3.5)
    assert tracker.states(["b", "a"]) == [ReplicaState("b"), expected]


def test_a_lost_replica_names_the_queries_that_can_be_replayed_and_those_that_cannot():
    tracker = ReplicaTracker()
    for name in ("waits", "answers"):
        tracker.routed(name, "a", 5)
    tracker.routed("elsewhere", "b", 5)
    tracker.first_token("answers")
    assert tracker.lost("a") == (["waits"], ["answers"])
    assert tracker.lost("a") == ([], [])
    tracker.routed("waits", "b", 5)
    tracker.ended("answers")  # it is told late
    assert tracker.states(["a", "b"]) == [ReplicaState("a"), ReplicaState("b", 2, 2, num_new_tokens=10)]


NAMES = st.sampled_from(["q0", "q1", "q2", "q3"])
REPLICAS = st.sampled_from(["a", "b"])


@dataclass
class Known:
    replica_id: str
    num_new_tokens: int
    is_queued: bool = field(default=True)


class BooksBesideAList(RuleBasedStateMachine):
    """Counts kept in step are those that counting anew finds."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self.queries = ReplicaTracker(), dict[str, Known]()

    @rule(name=NAMES, replica_id=REPLICAS, num=st.integers(0, 9))
    def routed(self, name, replica_id, num):
        self.tracker.routed(name, replica_id, num)
        self.queries[name] = Known(replica_id, num)

    @rule(name=NAMES)
    def first_token(self, name):
        self.tracker.first_token(name)
        if name in self.queries:
            self.queries[name].is_queued = False

    @rule(name=NAMES)
    def ended(self, name):
        self.tracker.ended(name)
        self.queries.pop(name, None)

    @rule(replica_id=REPLICAS)
    def lost(self, replica_id):
        queued, shown = self.tracker.lost(replica_id)
        there = {name: known for name, known in self.queries.items() if known.replica_id == replica_id}
        assert set(queued) == {name for name, known in there.items() if known.is_queued}
        assert set(shown) == there.keys() - set(queued)
        self.queries = {name: known for name, known in self.queries.items() if name not in there}

    @invariant()
    def counts_agree(self):
        for state in self.tracker.states(["a", "b"]):
            there = [known for known in self.queries.values() if known.replica_id == state.id]
            queued = [known for known in there if known.is_queued]
            counts = len(queued), len(there), sum(known.num_new_tokens for known in queued)
            assert (state.num_queued, state.num_open, state.num_new_tokens) == counts


TestBooksBesideAList = BooksBesideAList.TestCase
