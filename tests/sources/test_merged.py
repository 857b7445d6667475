"""Several sources as one: in order of arrival, or fused by reciprocal rank; one that fails takes no other with it."""

import asyncio
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag import Append, AppendMode, Chunk, CutShort, Hint, MergedSource, Pipeline, Skipped, Update
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import SourceEvent
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.fusion import RRF_K, reciprocal_rank_fusion
from streamrag.testing import ScriptedBackend, ScriptedSource

A, B, C, D = (Chunk(text, f"{text}.md", score=1.0) for text in "abcd")


def appended(chunk: Chunk) -> Append:
    return Append(Chunk(chunk.text, chunk.uri))


def plain(*chunks: Chunk) -> Update:
    return Update(tuple(Chunk(chunk.text, chunk.uri) for chunk in chunks))


async def events(*sources: Any, **options: Any) -> list[SourceEvent]:
    with anyio.fail_after(120):
        return [event async for event in MergedSource(*sources, **options).stream("Why?")]


async def test_appending_sources_are_merged_in_order_of_arrival_without_duplicates() -> None:
    first = ScriptedSource([Append(A), 0.1, Append(C)])
    second = ScriptedSource([0.05, Append(B), Append(Chunk("a", "a.md", score=2.0))])
    assert await events(first, second) == [appended(A), appended(B), appended(C)]


async def test_after_an_update_all_is_fused() -> None:
    ranks = ScriptedSource([0.05, Update((B, C)), 0.1, Update((C,))])
    appends = ScriptedSource([Append(A), 0.1, Append(B)])
    found = await events(ranks, appends)
    assert found[0] == appended(A)
    assert found[1] == plain(B, A, C)
    assert found[-1] == plain(C, A, B)


async def test_an_update_that_changes_nothing_is_not_sent() -> None:
    assert await events(ScriptedSource([Update((A, B)), Update((A, B))])) == [plain(A, B)]


async def test_weights_say_whose_ranks_count_for_more() -> None:
    first, second = ScriptedSource([Update((A, B))]), ScriptedSource([0.05, Update((B, C))])
    assert (await events(first, second))[-1] == plain(B, A, C)
    first, second = ScriptedSource([Update((A,))]), ScriptedSource([0.05, Update((C,))])
    assert (await events(first, second, weights=[1, 3]))[-1] == plain(C, A)


async def test_with_a_small_k_one_first_rank_is_worth_more_than_two_later_ones() -> None:
    rankings = [(A, B), (C, B)]
    for k, first in ((60, B), (0, A)):
        found = await events(*(ScriptedSource([Update(each)]) for each in rankings), k=k)
        assert isinstance(found[-1], Update)
        assert found[-1].chunks[0].text == first.text


def hints(*sources: Any) -> list[tuple[float, Hint | None]]:
    """In virtual time: when each event came, and what it said of those to come."""

    async def read() -> list[tuple[float, Hint | None]]:
        now, found = asyncio.get_running_loop().time, []
        began_s = now()
        async for event in MergedSource(*sources).stream("Why?"):
            assert isinstance(event, Append | Update)
            hint = event.hint and Hint(event.hint.num_chunks, event.hint.end_s and round(event.hint.end_s, 3))
            found.append((round(now() - began_s, 3), hint))
        return found

    return run_virtual(read())


def test_a_hint_is_of_all_sources_that_still_run() -> None:
    first = ScriptedSource([Append(A, Hint(1, 2.0)), 1.0, Append(B, Hint(0, 1.0))])
    second = ScriptedSource([0.5, Append(C, Hint(3, 4.0)), 2.0, Append(D, Hint(2, 1.5))])
    assert hints(first, second) == [
        (0.0, None),  # the second has said nothing yet
        (0.5, Hint(4, 4.0)),
        (1.0, Hint(3, 3.5)),  # what the second said half a second ago
        (2.5, Hint(2, 1.5)),  # the first has ended
    ]


def test_a_fused_update_adds_hints_and_leaves_out_fields_that_a_source_lacks() -> None:
    first = ScriptedSource([Update((A,), Hint(2, 5.0)), 2.0, Update((B,), Hint(1, 3.0)), 1.0])
    second = ScriptedSource([1.0, Update((C,), Hint(1))])
    assert hints(first, second) == [(0.0, None), (1.0, Hint(3)), (2.0, Hint(1, 3.0))]


async def test_skipped_and_cut_short_events_are_passed_on() -> None:
    told = [Skipped("x", "gone"), CutShort("no time")]
    assert await events(ScriptedSource([told[0]]), ScriptedSource([0.05, told[1]])) == told


async def test_a_source_that_fails_is_skipped_unless_all_fail(caplog: pytest.LogCaptureFixture) -> None:
    fails = ScriptedSource([Append(A), SourceError("no route")])
    found = await events(fails, ScriptedSource([0.05, Append(B)]))
    assert found == [appended(A), Skipped("ScriptedSource", "the source failed"), appended(B)]
    assert caplog.messages == ["ScriptedSource failed: SourceError: no route"]
    with pytest.raises(SourceError, match=r"MergedSource\(ScriptedSource, ScriptedSource\) failed: no route; no rope"):
        await events(
            ScriptedSource([SourceError("no route")]), ScriptedSource([Append(A), 0.05, SourceError("no rope")])
        )


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


async def test_a_source_whose_error_cannot_be_written_takes_no_other_with_it() -> None:
    failing = ScriptedSource([UnsayableError()])
    skipped = Skipped("ScriptedSource", "the source failed")
    assert await events(failing, ScriptedSource([0.05, Append(A)])) == [skipped, appended(A)]
    with pytest.raises(SourceError, match="failed: UnsayableError"):
        await events(failing)
    async with Pipeline(failing, ScriptedBackend("An answer."), on_source_error="answer") as pipeline:
        async with pipeline.stream("Why?") as answer:
            assert "".join([chunk.text async for chunk in answer]) == "An answer."
    assert str(answer.result.source_error).endswith("failed: UnsayableError: UnsayableError")


async def test_the_programs_own_mistake_is_no_failed_retrieval() -> None:
    with pytest.raises(ConfigurationError, match="not started"):
        await events(ScriptedSource([ConfigurationError("not started")]), ScriptedSource([Append(A)]))


async def test_stopping_stops_all_sources() -> None:
    sources = [ScriptedSource([Append(A), 3600.0]), ScriptedSource([3600.0])]
    async with Pipeline(MergedSource(*sources), ScriptedBackend()) as pipeline:
        with anyio.move_on_after(0.2):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert [source.num_streams for source in sources] == [0, 0]


class Held(ScriptedSource):
    """Must be started and closed."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__([Append(A)])
        self.fault = fault
        self.log: list[str] = []

    async def start(self, progress: Any) -> None:
        await asyncio.sleep(0)
        if self.fault:
            raise self.fault
        self.log.append("start")

    async def aclose(self) -> None:
        self.log.append("close")


async def test_a_merged_source_starts_and_closes_its_sources() -> None:
    held = [Held(), Held()]
    async with Pipeline(MergedSource(*held, ScriptedSource([Append(B)])), ScriptedBackend("ok")) as pipeline:
        _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert [each.log for each in held] == [["start"], ["start"]]
    assert [each.log for each in held] == [["start", "close"], ["start", "close"]]


async def test_a_source_that_cannot_start_closes_those_that_have() -> None:
    held = [Held(), Held(ConfigurationError("no such index"))]
    with pytest.raises(ConfigurationError, match="no such index"):
        await MergedSource(*held).start(lambda line: None)
    assert [each.log for each in held] == [["start", "close"], []]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, "2"], []])
def test_sources_and_weights_that_cannot_be_merged_are_named(weights: Any) -> None:
    sources = [ScriptedSource([]), ScriptedSource([])]
    with pytest.raises(ConfigurationError, match=r"weights.* must be (a positive|greater than 0|a finite|a valid) ?"):
        MergedSource(*sources, weights=weights)
    with pytest.raises(ConfigurationError, match="at least one source"):
        MergedSource()
    with pytest.raises(ConfigurationError, match="5 is no source"):
        MergedSource(ScriptedSource([]), 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="k=-1 must be greater than or equal to 0"):
        MergedSource(ScriptedSource([]), k=-1)


class Panic(BaseException):
    """As of a library that is not Python's."""


async def test_a_base_exception_fails_its_source_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = await events(ScriptedSource([Panic("oh")]), ScriptedSource([0.05, Append(B)]))  # type: ignore[list-item]
    assert found == [Skipped("ScriptedSource", "the source failed"), appended(B)]
    assert "Panic('oh'), although the query was not stopped" in caplog.text


async def test_a_passage_stays_the_same_chunk_when_another_source_finds_it() -> None:
    late = ScriptedSource([0.05, Update((Chunk("a", "a.md", "Another title", score=3.0),))])
    source = MergedSource(ScriptedSource([Append(A)]), late)
    async with Pipeline(source, ScriptedBackend("ok"), mode=AppendMode()) as pipeline:
        async with pipeline.stream("Why?") as stream:
            _ = [chunk async for chunk in stream]
    assert [citation.text for citation in stream.result.citations] == ["a"]


def test_a_text_that_is_in_one_ranking_several_times_counts_once() -> None:
    footer = [Chunk("footer", "b.md", passage=number) for number in (0, 9)]
    assert [chunk.text for chunk in reciprocal_rank_fusion([[A, *footer]])] == ["a", "footer"]


async def test_many_appends_behind_a_ranking_are_fused_together() -> None:
    appends = ScriptedSource([0.02, *(Append(Chunk(f"text {i}", f"{i}.md")) for i in range(1500))])
    found = await events(ScriptedSource([Update((A,))]), appends)
    assert isinstance(found[-1], Update)
    assert len(found[-1].chunks) == 1501
    assert len(found) < 750


RANKINGS = st.lists(st.lists(st.sampled_from([A, B, C, D]), unique=True, max_size=4), max_size=4)


@given(RANKINGS)
def test_fusion_is_what_its_formula_says(rankings: list[list[Chunk]]) -> None:
    fused = reciprocal_rank_fusion(rankings)
    exact = {
        chunk.uri: sum(1 / (RRF_K + ranking.index(chunk) + 1) for ranking in rankings if chunk in ranking)
        for ranking in rankings
        for chunk in ranking
    }
    assert {chunk.uri for chunk in fused} == exact.keys()
    scores = [exact[chunk.uri] for chunk in fused]
    assert all(a >= b - 1e-12 for a, b in pairwise(scores))
