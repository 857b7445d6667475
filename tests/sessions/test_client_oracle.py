"""Some seeds of `client_oracle`; by hand it plays more."""

from collections import Counter

from tests.sessions.client_oracle import run_seed


def test_each_question_sees_the_prompt_that_a_list_of_what_was_appended_gives() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        run_seed(seed, met)
    expected = {"answers", "cancelled", "chunks", "dropped", "failures", "freezes", "watched"}
    assert {name for name in expected if met[name] < 20} == set()
