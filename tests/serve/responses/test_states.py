"""What is kept of responses."""

import gc
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from streamrag.core import SamplingParams, Turn
from streamrag.serve import Limits
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.protocols.responses.requests import CheckedRequest, ResponseRequest
from streamrag.serve.protocols.responses.response_run import ResponseRun
from streamrag.serve.protocols.responses.states import State, StateStore
from tests.serve.serving import limits_of


def state(name: str, *turns: Turn) -> State:
    return State(name, b"{}", turns, brings_context=False)


def names(store: StateStore, owner: str, *candidates: str) -> list[str]:
    found = []
    for name in candidates:
        with suppress(RequestError):
            found.append(store.get(name, owner).id)
    return found


def test_the_least_recently_used_response_goes_first() -> None:
    store = StateStore(limits_of(max_states=2))
    store.add(state("a"), "alice")
    store.add(state("b"), "alice")
    store.get("a", "alice")
    store.add(state("c"), "alice")
    assert names(store, "alice", "a", "b", "c") == ["a", "c"]


def test_the_client_with_most_responses_loses_one_first() -> None:
    store = StateStore(limits_of(max_states=3))
    store.add(state("b"), "bob")
    for name in ("a1", "a2", "a3", "a4"):
        store.add(state(name), "alice")
    assert names(store, "bob", "b") == ["b"]
    assert names(store, "alice", "a1", "a2", "a3", "a4") == ["a3", "a4"]


def test_bytes_are_bounded_and_a_chain_counts_its_turns_once() -> None:
    turns = [Turn("user", "x" * 1000) for _ in range(4)]
    store = StateStore(limits_of(max_state_bytes=6_000))
    for number in range(4):
        store.add(state(f"s{number}", *turns[: number + 1]), "alice")
    assert store.num_states == 4
    assert 5000 < store.num_bytes < 6000
    store.add(state("other", Turn("user", "y" * 1000)), "alice")
    assert names(store, "alice", "s0", "s1", "s2", "s3", "other") == ["other"], "s3 held the turns of all before it"
    store.add(state("huge", Turn("user", "z" * 6000)), "alice")
    assert (store.num_states, store.num_bytes) == (0, 0)


def test_an_unused_response_expires() -> None:
    now_s = 0.0
    store = StateStore(limits_of(state_s=10), clock=lambda: now_s)
    store.add(state("a"), "alice")
    store.add(state("b"), "alice")
    now_s = 8.0
    store.get("a", "alice")
    now_s = 12.0
    assert names(store, "alice", "a", "b") == ["a"]
    now_s = 30.0
    store.add(state("c"), "bob")
    assert store.num_states == 1, "also of an owner who does not come back"


def test_owners_are_apart() -> None:
    store = StateStore(Limits())
    store.add(state("a"), "alice")
    assert names(store, "bob", "a") == []
    with pytest.raises(RequestError, match="no response 'a'"):
        store.delete("a", "bob")
    with pytest.raises(RequestError) as raised:
        store.previous("a", "bob", object())
    assert raised.value.param == "previous_response_id"
    assert store.previous("a", "alice") is store.get("a", "alice")
    connection = object()
    store.add(state("b"), "alice", connection)
    assert names(store, "alice", "b") == []
    assert store.get("b", "alice", connection).id == "b"
    store.forget("alice", connection)
    store.delete("a", "alice")
    assert (store.num_states, store.num_bytes) == (0, 0)


def test_a_response_that_is_deleted_leaves_its_turns_to_those_that_went_on_from_it() -> None:
    turn = Turn("user", "x" * 1000)
    store = StateStore(Limits())
    store.add(state("a", turn), "alice")
    store.add(state("b", turn, turn), "alice")
    store.delete("a", "alice")
    assert store.get("b", "alice").turns == (turn, turn)
    store.delete("b", "alice")
    assert store.num_bytes == 0


def test_a_store_for_no_responses_keeps_none() -> None:
    store = StateStore(limits_of(max_states=0))
    store.add(state("a"), "alice")
    assert store.num_states == 0


@contextmanager
def memory_of(store: StateStore) -> Iterator[None]:
    """Hold the store to what it says that it takes."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1.1 * store.num_bytes + 50_000
    finally:
        tracemalloc.stop()


def kept_response(store: StateStore, number: int, turns: tuple[Turn, ...] = (), **fields: object) -> ResponseRun:
    """A response as it is kept when its answer is there."""
    request = ResponseRequest.model_validate({"input": "Where?", **fields})
    checked = CheckedRequest(f"resp_{number}", request, turns, False, False, SamplingParams(), True)
    run = ResponseRun(checked, "scripted", keep=lambda state: store.add(state, "alice"))
    run.keep()
    return run


def test_responses_count_by_their_memory_whatever_their_fields_hold() -> None:
    store = StateStore(limits_of(max_state_bytes=1_000_000))
    with memory_of(store):
        for number in range(10):
            kept_response(store, number, tools=[{"type": "file_search", "x": json.loads(f"[{'[],' * 50_000}1]")}])
    assert store.num_states == 6
    assert 900_000 < store.num_bytes <= 1_000_000


def test_short_turns_count_by_the_memory_that_they_take() -> None:
    store = StateStore(limits_of(max_state_bytes=1_000_000))
    with memory_of(store):
        for number in range(10):
            kept_response(store, number, tuple(Turn("user", chr(0x1F600 + i % 80)) for i in range(1000)))
    assert 1 <= store.num_states < 5


def test_a_response_that_fails_after_it_was_kept_takes_nothing_away_from_the_count() -> None:
    store = StateStore(Limits())
    kept_response(store, 1)
    num_bytes = store.num_bytes
    run = kept_response(store, 2)
    run.encoder.fail(failure_of(RequestError("x" * 1000)))
    store.delete("resp_2", "alice")
    assert (store.num_states, store.num_bytes) == (1, num_bytes)
