"""What a batch of scores may change, and what it may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.core import Chunk
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.search.refinement import Failures, MeanDuration, Refinement
from streamrag.sources.search.reranker import TooSlowError

A, B, C, D, E = chunks = [Chunk(letter, f"{letter}.md") for letter in "abcde"]


def test_the_first_ranking_is_best_until_another_one_is_fused_with_it() -> None:
    found = Refinement(3)
    assert found.rank("keywords", [A, B, C, D])
    assert found.best == (A, B, C)
    assert found.rank("vectors", [C, E])
    assert found.best == (C, E, A)  # the vectors count twice
    assert not found.rank("vectors", [C, E])
    assert found.rank("vectors", [A, B])
    assert found.best == (A, B, C)


def test_scored_passages_stand_before_the_rest() -> None:
    found = Refinement(3)
    found.rank("keywords", chunks)
    assert found.score([A, B], [0.1, 0.2])
    assert found.best == (B, A, C)
    assert not found.score([C, D], [-5.0, -4.0]) or found.best == (B, A, D)
    assert found.best == (B, A, D)
    assert found.score([E], [9.0])
    assert found.best == (E, B, A)


def test_scores_that_say_what_the_order_is_already_change_nothing() -> None:
    found = Refinement(5)
    found.rank("keywords", chunks)
    assert not found.score([A, B], [2.0, 2.0])
    assert not found.score([C, D, E], [1.0, 1.0, 1.0])


@given(st.data())
def test_a_batch_leaves_what_stands_above_its_best_passage(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 30))
    ranked = [Chunk(str(i), f"{i}.md") for i in range(num)]
    found = Refinement(data.draw(st.integers(1, 10)))
    found.rank("keywords", ranked)
    scores: dict[Chunk, float] = {}
    while len(scores) < num:
        batch = ranked[len(scores) :][: data.draw(st.integers(1, 7))]
        new = {chunk: data.draw(st.floats(-9, 9)) for chunk in batch}
        before = found.best
        is_changed = found.score(batch, list(new.values()))
        assert is_changed == (before != found.best)
        above = sum(score >= max(new.values()) for score in scores.values())
        assert found.best[:above] == before[:above]
        scores |= new
    expected = sorted(ranked, key=lambda chunk: -scores[chunk])
    assert found.best == tuple(expected[: len(found.best)])


def test_a_pace_is_unknown_at_first_and_then_a_running_mean() -> None:
    pace = MeanDuration()
    assert pace.mean_s == float("inf")
    for took_s in (1.0, 2.0):
        pace.add(took_s)
    assert pace.mean_s == pytest.approx(1.2)


def test_failed_retrieval_is_noted_and_mistakes_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    is_open = True
    failures = Failures(lambda: is_open)
    secret = "/srv/inside is gone"
    for error in (SourceError(secret), ValueError("of somebody's source"), TooSlowError(secret)):
        with failures.record("the search"):
            raise error
    assert failures.missing == ["the search failed", "the search failed", "the search took too long"]
    assert caplog.messages[0] == f"the search failed: SourceError: {secret}"
    with pytest.raises(ConfigurationError), failures.record("the search"):
        raise ConfigurationError("not started")
    is_open = False
    with pytest.raises(SourceError), failures.record("the search"):
        raise SourceError("closed")
