"""Whether simulated drafts are revised as recorded, leave answers as they are, and are counted rightly."""

import random

import pytest
from answer_ahead_replay import WAYS, Load, Replay
from answer_ahead_simulated import summarize
from answer_ahead_tables import SIMULATED_TABLES, worse
from answer_revisions import KEPT, Answers, Block, Revision


def test_a_revision_has_the_blocks_that_two_answers_share() -> None:
    before, after = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 5, 6, 7, 8]
    revision = Revision.of(before, after)
    assert revision == Revision(8, 8, (Block(0, 0, 2), Block(4, 4, 4)))
    assert revision.prefix == 0.25
    assert Revision.of(after, after).is_whole


def test_a_revision_stretches_to_the_length_of_an_answer() -> None:
    answer = list(range(1_000, 1_080))
    revised = Revision(8, 8, (Block(0, 0, 2), Block(3, 4, 4))).apply(answer, random.Random(0))
    assert revised[:20] == answer[:20]
    assert revised[40:80] == answer[30:70]
    assert len(revised) == 80
    assert not set(revised[20:40]) & set(answer)
    assert KEPT.apply(answer, random.Random(0)) == answer


def test_the_answers_of_a_query_are_the_same_whenever_they_are_asked_for() -> None:
    revisions = [KEPT, Revision(2, 2, (Block(0, 0, 1),))]
    one, other = (Answers("query", 30, revisions) for _ in range(2))
    assert [one.next() for _ in range(5)] == [other.next() for _ in range(5)]


@pytest.fixture(scope="module")
def served() -> dict:
    """A light load, whose drafts are always right, in each way."""
    load = Load("crawler", 0.5, 20, num_queries=3, quality="right")
    return {way: Replay(load, way).run() for way in WAYS}


def test_right_drafts_leave_one_verification_after_retrieval(served: dict) -> None:
    for way in WAYS:
        for row in served[way][0].values():
            assert row.is_complete == (way == "ahead")
            assert row.num_accepted == (
                18 if way == "ahead" else 0
            )  # the first comes with the prompt, the last with 18
    for query_id, row in served["ahead"][0].items():
        without = served["sync"][0][query_id]
        assert row.retrieval_end_s == without.retrieval_end_s
        assert row.last_s < without.last_s / 2
        assert without.idle_s > 1


def test_the_engines_time_is_split_between_drafts_and_others(served: dict) -> None:
    ahead, sync = served["ahead"][1], served["sync"][1]
    assert 0 < ahead.draft_s < ahead.busy_s
    assert ahead.num_drafted > 0
    assert sync.draft_s == sync.num_drafted == sync.held_s == 0


def test_a_summary_counts_complete_answers_and_names_what_became_worse(served: dict) -> None:
    summary = summarize([served], 20)
    assert summary["complete"] == 1.0
    assert (summary["num_seeds"], summary["num_queries"]) == (1, 3)
    assert all("crawler 1 QPS" in make({"crawler 1 QPS, 200 tokens": summary}) for make in SIMULATED_TABLES.values())
    assert summary["num_accepted"] == 54
    assert summary["last_bound_decode_p50"] <= summary["last_bound_idle_p50"] <= summary["last_sync_p50"]
    assert not [text for text in worse(summary, "sync") if text.startswith("last")]
    assert list(worse({**summary, "last_ahead_p95": 2 * summary["last_sync_p95"]}, "sync")) == ["last P95 +100.0%"]
