"""The verdict on a comparison in words."""

import re

import pytest
from asked_pairs import events, group_of

from streamrag_bench.compare.pairs import FIRST_TOKEN
from streamrag_bench.compare.report import as_json, make_page, sentences_of
from streamrag_bench.compare.words import limits, verdict, why_unclear

FASTER = (events(ttft_s=1.2, total_s=2.2), events(ttft_s=2.0, total_s=3.0))
NOISE = [(events(ttft_s=1.6), events(ttft_s=ttft_s)) for ttft_s in (1.3, 2.5)]


def test_the_verdict_has_the_gain_of_both_tokens_and_both_clocks() -> None:
    first, *_ = verdict(group_of(FASTER, FASTER))
    assert first == (
        "Verdict, crawl: streaming is faster here. The first token comes 1.67 times as soon (1.67 to 1.67) after the "
        "question, and 5.00 times as soon (5.00 to 5.00) after retrieval. The last token comes 1.36 times as soon "
        "(1.36 to 1.36) after the question."
    )


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([FASTER[::-1]] * 2, "streaming is slower here; Pipeline(overlap=False) does without it. The first token comes "
                             "1.67 times as late (1.67 to 1.67) after the question"),
        ([(events(), events())] * 2, "streaming makes no difference here. The first token comes at the same time (1.00 "
                                     "to 1.00 times as soon)"),
        (NOISE, "it is unclear whether streaming is faster here. The first token comes perhaps sooner and perhaps "
                "later"),
        ([FASTER], "it is unclear whether streaming is faster here. The first token comes 1.67 times as soon in the "
                   "only pair"),
    ],
)  # fmt: skip
def test_the_verdict_says_also_what_does_not_help(pairs: list[tuple[list, list]], words: str) -> None:  # type: ignore[type-arg]
    first, *_ = verdict(group_of(*pairs))
    assert words in first


def test_the_verdict_says_what_was_retrieved_when_and_whether_answers_are_equal() -> None:
    other = (events(), events(token_ids=(1, 3)))
    text = " ".join(verdict(group_of(FASTER, other)))
    assert (
        "Retrieval (medians): the first of 1 results came 0.50 s after the question, the last after 0.50 s, and the "
        "end after 1.00 s."
    ) in text
    assert "the context was the same both ways in 2 of 2 pairs, and the answer in 1 of those. Rounding" in text
    assert "Retrieval found nothing, and ended after 1.00 s" in " ".join(
        verdict(group_of((events(first_chunk_s=None), events(first_chunk_s=None))))
    )


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((events(), events(first_chunk_s=0.99)), "retrieval ends 0.01 s after its first result"),
        ((events(), events(first_chunk_s=0.9, ttft_s=1.5)), "retrieval goes on for 0.10 s after its first result"),
        (
            (events(), events(first_chunk_s=0.1, ttft_s=1.3)),
            "no more than the 0.30 s after retrieval",
        ),
        ((events(retrieval_s=1.4), events()), "retrieval takes 0.40 s longer with streaming"),
        ((events(num_invalidated=30), events()), "later results replaced 30% of a prompt"),
    ],
)
def test_limits_and_costs_of_the_gain_are_named(pair: tuple[list, list], words: str) -> None:  # type: ignore[type-arg]
    assert words in " ".join(limits(group_of(pair)))


@pytest.mark.parametrize(
    ("pairs", "share", "sentence"),
    [
        ([FASTER] * 2, 0.6, ""),
        (
            NOISE,
            0.27,
            "Unclear (search, first token, from the question; search, first token, after retrieval): 2 pairs show too "
            "little while other programs keep 27% of the cores busy. Close them, or measure longer.",
        ),
        (
            NOISE,
            0.01,
            "Unclear (search, first token, from the question; search, first token, after retrieval): 2 pairs show too "
            "little for times that differ so much: measure longer.",
        ),
        (
            [FASTER],
            None,
            "Unclear (search, first token, from the question; search, first token, after retrieval): one pair shows "
            "too little for times that differ so much: measure longer.",
        ),
    ],
)
def test_unclear_figures_have_a_cause_and_a_remedy(
    pairs: list[tuple[list, list]],  # type: ignore[type-arg]
    share: float | None,
    sentence: str,
) -> None:
    groups = [group_of(FASTER, FASTER), group_of(*pairs, name="search")]
    assert why_unclear(groups, share, FIRST_TOKEN, "measure longer") == sentence


def test_the_page_has_the_verdict_the_figures_and_a_picture() -> None:
    groups = [group_of(FASTER, FASTER, name="<b>crawl</b>")]
    page = make_page(groups, sentences_of(groups))
    assert "streaming is faster here" in page
    assert "1.67 to 1.67" in page
    assert "data:image/svg+xml" in page
    assert "<b>crawl" not in page
    assert re.findall(r"(?:src|href)=\"https?:", page) == [], "it is one file"


def test_the_json_has_the_times_of_each_pair() -> None:
    (group,) = as_json([group_of(FASTER)], 0.1, ["Verdict."])["groups"]
    found = group["intervals"]["first token, after retrieval"]
    assert found == {"low": None, "middle": pytest.approx(5.0), "high": None, "word": "unclear"}
    assert [[row["arm"], row["ttft_s"], row["chunks_s"]] for row in group["pairs"][0]] == [
        ["streaming", 1.2, [0.5]],
        ["not streaming", 2.0, [0.5]],
    ]
