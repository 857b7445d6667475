"""How a context follows its retriever, and that many chunks take no more time each than a few."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag import Append, AppendMode, Chunk, ConfigurationError, Pipeline, Update, UpdateMode
from streamrag.core import Mode
from streamrag.modes.context import Context, passage_key
from streamrag.testing import ScriptedBackend, ScriptedSource

A, B, C = (Chunk(text, f"{text}.md") for text in "abc")


def test_update_mode_follows_the_source() -> None:
    mode = UpdateMode()
    assert mode.fold((), Append(A)) == (A,)
    assert mode.fold((A,), Append(B)) == (A, B)
    assert mode.fold((A, B), Update((C, A))) == (C, A)
    assert mode.fold((A, B), Update(())) == ()


def test_stable_order_keeps_survivors_in_place_and_puts_newcomers_behind() -> None:
    mode = UpdateMode(order="stable")
    assert mode.fold((), Update((B, A))) == (B, A)
    assert mode.fold((A, B), Update((C, B, A))) == (A, B, C)
    assert mode.fold((A, B), Update((C, B))) == (B, C)
    assert mode.fold((A,), Append(B)) == (A, B)
    assert mode.fold((A,), Append(A)) == (A,)
    assert mode.fold((A, B), Update(())) == ()


def test_a_survivor_has_its_new_score() -> None:
    better = replace(A, score=0.9)
    assert UpdateMode("stable").fold((replace(A, score=0.1), B), Update((C, B, better))) == (better, B, C)


def test_an_unknown_order_of_passages_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="order='score' must be 'rank' or 'stable'"):
        UpdateMode("score")  # type: ignore[arg-type]


def test_append_mode_only_grows() -> None:
    mode = AppendMode()
    assert mode.fold((A,), Append(B)) == (A, B)
    assert mode.fold((A, B), Update((C, A))) == (A, B, C)
    assert mode.fold((A, B), Update(())) == (A, B)


def test_append_mode_keeps_a_passage_that_comes_again_with_another_score() -> None:
    mode = AppendMode()
    scored, better = replace(A, score=0.1), replace(A, score=0.9)
    assert mode.fold((A,), Update((B, scored))) == (A, B)
    assert mode.fold((scored,), Update((A,))) == (scored,)
    assert mode.fold((scored,), Update((better, replace(B, score=0.5)))) == (scored, replace(B, score=0.5))
    assert mode.fold((), Update((better, scored))) == (better,)
    for chunks in ((scored, B), Context((scored, B)), Context((scored,)).with_chunks((scored, B))):
        assert mode.fold(chunks, Append(better)) == (scored, B)
        assert mode.fold(chunks, Append(C)) == (scored, B, C)


def test_no_chunk_is_in_a_context_twice() -> None:
    for mode in (AppendMode(), UpdateMode()):
        assert mode.fold((A, B), Append(A)) == (A, B)
        assert mode.fold((), Update((A, B, A))) == (A, B)


def test_passages_of_one_document_are_different_chunks() -> None:
    first, second = Chunk("same", "a.md", passage=0), Chunk("same", "a.md", passage=1)
    assert UpdateMode().fold((first,), Append(second)) == (first, second)


class Shuffling:
    """A mode of a user's own, of all kinds of changes."""

    def fold(self, chunks: tuple[Chunk, ...], event: Append | Update) -> tuple[Chunk, ...]:
        new = event.chunks if isinstance(event, Update) else (event.chunk,)
        return (*new, *(chunk for chunk in chunks if chunk not in new))[:3]


chunks_of_few = st.sampled_from([Chunk(text, "a.md") for text in "abcde"])
scored_chunks = st.builds(replace, chunks_of_few, score=st.sampled_from([None, 0.5]))


def events_of(chunks: st.SearchStrategy[Chunk]) -> st.SearchStrategy[Append | Update]:
    return chunks.map(Append) | st.lists(chunks, max_size=4).map(lambda chunks: Update(tuple(chunks)))


events = events_of(chunks_of_few)


@given(
    mode=st.sampled_from([AppendMode(), UpdateMode(), UpdateMode("stable"), Shuffling()]),
    events=st.lists(events_of(scored_chunks), max_size=12),
)
def test_a_context_knows_what_it_holds_whatever_a_mode_makes_of_it(mode: Mode, events: list[Append | Update]) -> None:
    contexts, plain = [Context()], tuple[Chunk, ...]()
    for event in events:
        contexts.append(contexts[-1].with_chunks(mode.fold(contexts[-1], event)))
        contexts[-1].with_chunks((*contexts[-1], Chunk("f", "a.md")))  # which nobody keeps
        plain = mode.fold(plain, event)
        assert contexts[-1] == plain
        for context in contexts:  # earlier ones too: a mode may have kept them
            held = tuple(context)
            keys = {passage_key(chunk) for chunk in held}
            for chunk in (Chunk(text, "a.md", score=score) for text in "abcdef" for score in (None, 0.5)):
                assert (chunk in context) == (chunk in held)
                assert (passage_key(chunk) in context) == (passage_key(chunk) in keys)
        if isinstance(mode, AppendMode):
            assert len({passage_key(chunk) for chunk in plain}) == len(plain)


@given(events=st.lists(events, max_size=12))
def test_stable_order_has_the_same_passages_and_keeps_the_order_of_those_that_stay(
    events: list[Append | Update],
) -> None:
    ranked, stable = tuple[Chunk, ...](), tuple[Chunk, ...]()
    for event in events:
        before = stable
        ranked, stable = UpdateMode().fold(ranked, event), UpdateMode("stable").fold(stable, event)
        assert set(stable) == set(ranked)
        assert len(stable) == len(ranked)
        stayed = [chunk for chunk in before if chunk in stable]
        assert list(stable[: len(stayed)]) == stayed
        assert [c for c in stable if c not in before] == [c for c in ranked if c not in before]


@pytest.mark.parametrize(
    ("mode", "uris", "ranks", "is_in_rank_order"),
    [
        (UpdateMode(), "cab", [1, 2, 3], True),
        (UpdateMode("stable"), "abc", [2, 3, 1], False),
        (AppendMode(), "abc", [2, 3, 1], False),
    ],
)
async def test_an_answer_says_whether_its_passages_are_in_rank_order(
    mode: Mode, uris: str, ranks: list[int], is_in_rank_order: bool
) -> None:
    source = ScriptedSource([Update((A, B)), Update((C, A, B))])
    backend = ScriptedBackend("ok")
    async with Pipeline(source, backend, mode=mode) as pipeline:
        answer = await collect(pipeline)
    assert [citation.uri for citation in answer.citations] == [f"{uri}.md" for uri in uris]
    assert [citation.number for citation in answer.citations] == [1, 2, 3]
    assert [citation.rank for citation in answer.citations] == ranks
    assert answer.is_in_rank_order == is_in_rank_order
    prompt = backend.model.tokenizer.decode(backend.prompts[0][-1].token_ids)
    for citation in answer.citations:  # the number that the model saw
        assert f"[{citation.number}] {citation.uri} ({citation.uri})\n{citation.text}" in prompt


async def test_passages_behind_a_ranking_have_the_next_ranks_and_a_crawl_has_none() -> None:
    async with Pipeline(ScriptedSource([Update((A,)), Append(B)]), ScriptedBackend("ok")) as pipeline:
        answer = await collect(pipeline)
    assert ([citation.rank for citation in answer.citations], answer.is_in_rank_order) == ([1, 2], True)
    async with Pipeline(ScriptedSource([Append(A), Append(B)]), ScriptedBackend("ok")) as pipeline:
        answer = await collect(pipeline)
    assert ([citation.rank for citation in answer.citations], answer.is_in_rank_order) == ([None, None], True)


class CountedText(str):
    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedText.num_comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("mode", [AppendMode(), UpdateMode()])
async def test_appended_chunks_are_not_compared_with_all_that_came_before(mode: Mode) -> None:
    num_chunks = 300
    steps: list[Any] = [Append(Chunk(CountedText(f"text {i}"), f"{i}.md")) for i in range(num_chunks)]
    CountedText.num_comparisons = 0
    async with Pipeline(ScriptedSource(steps), ScriptedBackend("ok", max_model_len=2000), mode=mode) as pipeline:
        answer = await collect(pipeline)
    assert len(answer.left_out) > num_chunks // 2
    assert CountedText.num_comparisons < 20 * num_chunks


async def collect(pipeline: Pipeline) -> Any:
    async with pipeline.stream("Why?") as stream:
        async for _ in stream:
            pass
    return stream.result
