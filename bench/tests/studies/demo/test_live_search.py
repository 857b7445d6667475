"""What is made of questions that were asked in three ways."""

from studies.demo.live_search import ARMS, Row, summary


def test_ratios_are_of_the_same_question_and_turn() -> None:
    taken_s = {0: (4.0, 1.0, 2.0), 1: (1.0, 1.0, 0.5)}
    rows = [
        Row("?", turn, arm, "none", 1.0, waited_s, 1.0 + waited_s, 10 * number, (turn, number // 2))
        for turn, each in taken_s.items()
        for number, (arm, waited_s) in enumerate(zip(ARMS, each, strict=True))
    ]
    waiting, always, learnt = summary(rows).values()
    assert waiting["ttft_after_retrieval_s_ratio"] == waiting["ttft_s_ratio"] == 1.0
    assert always["ttft_after_retrieval_s_ratio"] == (4.0 + 1.0) / 2
    assert learnt["ttft_after_retrieval_s"] == 1.25
    assert [row["num_invalidated"] for row in (waiting, always, learnt)] == [0, 20, 40]
    assert [row["num_equal"] for row in (waiting, always, learnt)] == [2, 2, 0]
