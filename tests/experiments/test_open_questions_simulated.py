"""The benchmark of who pays for questions that are still being asked, with a few of them."""

from open_questions_simulated import GROUPS, NUM_PASSAGES, PASSAGE_GAP_S, WAYS, serve, summarize

from streamrag.bench.virtual_time import run_virtual


def test_only_listening_costs_unused_tokens_and_answers_follow_retrieval() -> None:
    rows = {}
    for way in WAYS:
        answers, busy_s = run_virtual(serve(1.0, "other", way, 1, 4))
        assert len(answers) == 4
        assert all(each.last_s > each.first_s > NUM_PASSAGES * PASSAGE_GAP_S for each in answers)
        rows[way] = {group: summarize([each for each in answers if each.group == group]) for group in GROUPS}
        rows[way]["engine"] = {"busy_s": busy_s}
    asked, listened = (rows[way] for way in WAYS)
    assert asked["typists"]["num_unused_tokens"] == 0
    assert asked["typists"]["num_retrievals"] == 1
    assert listened["others"]["num_unused_tokens"] == 0
    assert listened["typists"]["num_unused_tokens"] > 1_000
    assert listened["typists"]["num_retrievals"] > 1
    assert listened["engine"]["busy_s"] > asked["engine"]["busy_s"]
