from collections import Counter
from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

from early_exit import THRESHOLDS, at_thresholds, grouped, questions

from streamrag.sessions.answer import TokenIds


def test_sixty_questions_have_one_right_answer_each() -> None:
    every = questions()
    assert Counter((question.kind, len(question.answers)) for question in every) == {
        ("log", 2): 15,
        ("log", 3): 15,
        ("meeting", 2): 15,
        ("meeting", 3): 15,
    }
    assert all(question.expected in question.answers for question in every)
    assert len({(question.lines, question.text) for question in every}) == 60


async def test_each_pass_is_made_once_and_counted_for_each_threshold_that_needs_it() -> None:
    made: list[TokenIds] = []

    async def one_pass(begun: TokenIds, allowed: Sequence[int]) -> tuple[int | None, Any]:
        made.append(begun)
        logprobs = {1: -0.5, 2: -2.0} if not begun else dict.fromkeys(allowed, -3.0 if begun == (1,) else -0.1)
        return allowed[0], {token: SimpleNamespace(logprob=value) for token, value in logprobs.items()}

    found = await at_thresholds({(1, 3): "first", (2, 4): "second"}, one_pass)
    assert [each.text for each in found] == ["first", "first", "second", "second", "second"]
    assert [each.num_passes for each in found] == [1, 1, 3, 3, 3]
    assert made == [(), (1,), (2,)]

    (first, *_), *_ = [questions()]
    table = grouped([(first, 2, found)])
    assert [(row["num_passes"], row["num_same"]) for row in table[: len(THRESHOLDS)]] == [
        (1, 0),
        (1, 0),
        (3, 1),
        (3, 1),
        (3, 1),
    ]
    assert table[len(THRESHOLDS) - 1]["threshold"] is None
    assert THRESHOLDS[-1] == inf
