"""Replicas and queries for tests of routers."""

from hypothesis import strategies as st

from streamrag.routing import Opening, ReplicaState

LONG, OTHER = Opening(tuple(range(640))), Opening(tuple(range(1_000, 1_640)))


def replicas(*names, **common):
    return [ReplicaState(name, max_open=10, measured_s=0.0, **common) for name in names]


STATES = st.lists(
    st.builds(
        ReplicaState,
        st.integers(0, 99).map(str),
        num_queued=st.integers(0, 20),
        num_open=st.integers(0, 40),
        max_open=st.integers(1, 32),
        num_new_tokens=st.integers(0, 10_000),
        kv_usage=st.floats(0, 1),
        cache_hit_rate=st.floats(0, 1),
        num_kv_tokens=st.integers(0, 2_000),
        tokens_per_s=st.one_of(st.just(0.0), st.floats(1, 1e5)),
        measured_s=st.floats(-10, 0),
    ),
    max_size=6,
    unique_by=lambda state: state.id,
)
OPENINGS = st.builds(
    Opening,
    st.lists(st.integers(0, 2), max_size=5).map(lambda blocks: tuple(token for b in blocks for token in [b] * 64)),
    session=st.one_of(st.none(), st.sampled_from(["s", "t"])),
)


def check_ranking(router, rounds):
    """Whatever a router is told, it names each replica once."""
    for opening, states in rounds:
        names = router.rank(opening, states, 0.0)
        assert sorted(names) == sorted(state.id for state in states)
        if names:
            assert router.routed(opening, names[0]) >= 0
            router.completed(opening.token_ids, names[0])
            router.lost(names[-1])
