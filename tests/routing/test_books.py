from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamrag.routing import Books, ReplicaState, Report


def test_a_query_counts_as_queued_until_its_first_token_and_as_open_until_it_ends():
    books = Books()
    books.routed("q", "a", 100)
    assert books.states(["a"]) == [ReplicaState("a", num_queued=1, num_open=1, num_new_tokens=100)]
    books.first_token("q")
    books.first_token("q")
    assert books.states(["a"]) == [ReplicaState("a", num_open=1)]
    books.ended("q")
    books.ended("q")
    assert books.states(["a"]) == [ReplicaState("a")]


def test_what_a_replica_reports_stands_beside_the_fresh_counts():
    books = Books()
    books.routed("q", "a", 7)
    books.reported("a", Report(32, 0.5, 0.25, 900, 10_000, 8_000.0), now_s=3.5)
    expected = ReplicaState("a", 1, 1, 32, 7, 0.5, 0.25, 900, 10_000, 8_000.0, 3.5)
    assert books.states(["b", "a"]) == [ReplicaState("b"), expected]


def test_a_lost_replica_names_the_queries_that_can_be_replayed_and_those_that_cannot():
    books = Books()
    for name in ("waits", "answers"):
        books.routed(name, "a", 5)
    books.routed("elsewhere", "b", 5)
    books.first_token("answers")
    assert books.lost("a") == (["waits"], ["answers"])
    assert books.lost("a") == ([], [])
    books.routed("waits", "b", 5)
    books.ended("answers")  # it is told late
    assert books.states(["a", "b"]) == [ReplicaState("a"), ReplicaState("b", 2, 2, num_new_tokens=10)]


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
        self.books, self.queries = Books(), dict[str, Known]()

    @rule(name=NAMES, replica_id=REPLICAS, num=st.integers(0, 9))
    def routed(self, name, replica_id, num):
        self.books.routed(name, replica_id, num)
        self.queries[name] = Known(replica_id, num)

    @rule(name=NAMES)
    def first_token(self, name):
        self.books.first_token(name)
        if name in self.queries:
            self.queries[name].is_queued = False

    @rule(name=NAMES)
    def ended(self, name):
        self.books.ended(name)
        self.queries.pop(name, None)

    @rule(replica_id=REPLICAS)
    def lost(self, replica_id):
        queued, shown = self.books.lost(replica_id)
        there = {name: known for name, known in self.queries.items() if known.replica_id == replica_id}
        assert set(queued) == {name for name, known in there.items() if known.is_queued}
        assert set(shown) == there.keys() - set(queued)
        self.queries = {name: known for name, known in self.queries.items() if name not in there}

    @invariant()
    def counts_agree(self):
        for state in self.books.states(["a", "b"]):
            there = [known for known in self.queries.values() if known.replica_id == state.id]
            queued = [known for known in there if known.is_queued]
            counts = len(queued), len(there), sum(known.num_new_tokens for known in queued)
            assert (state.num_queued, state.num_open, state.num_new_tokens) == counts


TestBooksBesideAList = BooksBesideAList.TestCase
