"""A fixed few of random loads of sessions; `make fuzz OF=sessions` plays more."""

from collections import Counter

from tests.sessions.fuzz import run_seed

SITUATIONS = [
    "answers checked",
    "answers of few, that were there already",
    "answers that were there already",
    "asked: is cancelled after some time",
    "asked: is cancelled where it waits",
    "askers who left in the middle",
    "chunks dropped",
    "deadlines passed",
    "forced preemptions",
    "host blocks loaded",
    "prefix cache resets",
    "requests of others",
    "sessions closed early",
    "slides",
    "system texts frozen",
    "told that the session was closed",
    "watched answers",
    "watched answers of few",
]


def test_answers_of_sessions_are_those_of_one_request_whatever_happens_around_them() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        run_seed(seed, met)
    assert {name for name in SITUATIONS if not met[name]} == set()
