"""When the next chunk is expected, and what of."""

import math

import pytest

from streamrag.engine.forecast import ChunkForecast
from streamrag.engine.request import RequestView


def view(last_chunk_s: float, source: str = "crawl", expected_complete_s: float | None = None) -> RequestView:
    return RequestView(
        "r", 0.0, last_chunk_s, 10, source_name=source, expected_complete_s=expected_complete_s, is_complete=False
    )


def test_a_stream_is_expected_to_go_on_after_the_mean_gap_of_its_source() -> None:
    forecast = ChunkForecast()
    for _ in range(100):
        forecast.observe("crawl", 4.0, 1.0)
        forecast.observe("search", 0.5, 0.6)
    assert round(forecast.expected_s(view(10.0), 11.0), 6) == 14.0
    assert round(forecast.expected_s(view(10.0, "search"), 10.1), 6) == 10.5


def test_a_source_that_keeps_little_of_what_it_has_sent_replaces() -> None:
    forecast = ChunkForecast()
    for number in range(100):
        forecast.observe("crawl", 1.0, 0.999)  # the last token of a chunk may merge with the next
        forecast.observe("search", 1.0, (0.3, 1.0)[number % 2])
    min_interval_s = [forecast.replaced_every_s(source) for source in ("crawl", "search", "never seen")]
    assert min_interval_s == [math.inf, pytest.approx(1 / 0.35, rel=0.1), math.inf]


def test_a_source_that_changes_its_ways_is_learnt_anew() -> None:
    forecast = ChunkForecast()
    for kept_share, is_replacing in ((1.0, False), (0.2, True), (1.0, False)):
        for _ in range(100):
            forecast.observe("search", 1.0, kept_share)
        assert (forecast.replaced_every_s("search") < math.inf) == is_replacing


def test_a_late_chunk_is_expected_to_stay_away_as_long_again() -> None:
    forecast = ChunkForecast()
    forecast.observe("crawl", 1.0, 1.0)
    assert forecast.expected_s(view(10.0), 30.0) == 50.0


def test_the_longest_idle_is_expected_last_where_nothing_is_known() -> None:
    forecast = ChunkForecast()
    assert forecast.expected_s(view(1.0), 9.0) > forecast.expected_s(view(5.0), 9.0) > 9.0


def test_the_retrievers_own_estimate_counts_more_until_it_has_passed() -> None:
    forecast = ChunkForecast()
    assert forecast.expected_s(view(10.0, expected_complete_s=13.0), 12.0) == 13.0
    assert forecast.expected_s(view(10.0, expected_complete_s=11.0), 12.0) == 14.0


def test_names_that_never_come_twice_do_not_fill_the_memory() -> None:
    forecast = ChunkForecast()
    for number in range(5_000):
        forecast.observe(f"source {number}", 1.0, 1.0)
    assert len(forecast._habits) <= 1_000
