"""How many watched questions go at once."""

from streamrag.sessions.concurrency import MAX_CONCURRENT, ConcurrencyEstimator


def measured(fixed_s: float, each_s: float, interval_s: float | None, num_rounds: int = 30) -> list[int]:
    """How many went at once in each round, where n take `fixed_s + n * each_s`."""
    at_once, sizes, now_s = ConcurrencyEstimator(), [], 0.0
    for _ in range(num_rounds):
        if interval_s is not None:
            at_once.observe_version(now_s)
            now_s += interval_s
        sizes.append(at_once.limit)
        for _ in range(sizes[-1]):
            at_once.observe_answer(sizes[-1], fixed_s + each_s * sizes[-1])
    return sizes


def test_watched_questions_double_each_time_while_they_end_in_time() -> None:
    assert measured(0.01, 0.001, 1.0)[:6] == [1, 2, 4, 8, 16, MAX_CONCURRENT]
    assert measured(0.01, 0.001, None)[-1] == MAX_CONCURRENT, "nothing changes: all may go"


def test_the_number_of_watched_questions_is_that_which_ends_before_data_change() -> None:
    assert measured(0.01, 0.01, 0.1)[-1] in (8, 9)


def test_cheap_extra_questions_run_though_not_even_one_ends_in_time() -> None:
    assert measured(0.1, 0.001, 0.01)[-1] == MAX_CONCURRENT
    assert measured(0.1, 0.1, 0.01)[-1] in (2, 3)


def test_times_that_say_nothing_do_no_harm() -> None:
    for took_s in (0.0, 1e-12):
        assert measured(took_s, 0.0, 1.0)[-1] == MAX_CONCURRENT
    at_once = ConcurrencyEstimator()
    for num, seconds in ((1, 5.0), (2, 0.1), (4, 9.0), (3, 0.0)):  # less for more
        at_once.observe_answer(num, seconds)
        assert 1 <= at_once.limit <= MAX_CONCURRENT
