"""Which chunks are in a prompt that has no room for all, and that streaming chooses the same ones."""

import random
import re
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag import (
    Append,
    AppendMode,
    Chunk,
    CutShort,
    Pipeline,
    PromptTemplate,
    SamplingParams,
    Skipped,
    Update,
    UpdateMode,
)
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import SourceEvent
from streamrag.core.relevance import Relevance
from streamrag.errors import ConfigurationError
from streamrag.modes import AssembledPrompt, PromptAssembler
from streamrag.modes.budget import PassageBudget
from streamrag.query.options import QueryOptions
from streamrag.telemetry import ChunksLeftOut, ChunksShortened
from streamrag.testing import ScriptedBackend, ScriptedSource

QUESTION = "How do I cancel a task group?"
ANSWER = "A group of tasks is cancelled by its cancel scope."
FILLER = "The weather was fine on that day, and nobody thought of anything else.\n\n"
BUDGET = 4000


def page(number: int, num_chars: int, answer: str = "") -> Chunk:
    return Chunk((FILLER * num_chars)[:num_chars] + answer, f"{number}.md", f"Page {number}")


def assembler(budget: int = BUDGET, reserve_fraction: float = 0.25) -> PromptAssembler:
    return PromptAssembler(
        CodePointTokenizer(),
        PromptTemplate(),
        QUESTION,
        max_model_len=100_000,
        max_tokens=10,
        max_context_tokens=budget,
        relevance=Relevance(QUESTION),
        reserve_fraction=reserve_fraction,
    )


def arrived(chunks: list[Chunk], budget: int = BUDGET, reserve_fraction: float = 0.25) -> AssembledPrompt:
    return assembler(budget, reserve_fraction).assemble(chunks, is_complete=True, is_ranked=False)


def num_context_tokens(step: AssembledPrompt) -> int:
    empty = len(assembler().assemble([], is_complete=True).prompt.token_ids) - len("(no documents were found)\n\n")
    return len(step.prompt.token_ids) - empty


def test_a_first_page_that_would_fill_the_context_leaves_room_for_those_that_answer() -> None:
    first, noise, answer = page(1, 5000), page(2, 2000), page(3, 3000, ANSWER)
    step = arrived([first, noise, page(4, 2500), answer])
    assert len(step.included[0].text) <= BUDGET / 3
    assert any(ANSWER in chunk.text for chunk in step.included)
    assert set(step.shortened) >= {first, answer}
    assert num_context_tokens(step) <= BUDGET


def test_a_page_without_any_paragraphs_is_shortened_too() -> None:
    step = arrived([Chunk("x" * 50_000, "1.md"), page(2, 1000)])
    assert [chunk.uri for chunk in step.included[:2]] == ["1.md", "2.md"]
    assert len(step.included[0].text) <= BUDGET / 3
    assert num_context_tokens(step) <= BUDGET


class Pairs(CodePointTokenizer):
    """Two characters are a token, and one is that is not ASCII."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [ord(each[0]) for each in re.findall(r"[\x00-\x7f]{1,2}|.", text, re.DOTALL)]


PAIRS = PromptAssembler(
    Pairs(),
    PromptTemplate(),
    QUESTION,
    max_model_len=8192,
    max_tokens=16,
    relevance=Relevance(QUESTION),
    reserve_fraction=0.25,
)
RARE = "A task group " + "\N{NAZAR AMULET}" * 400
LARGE = {
    **{f"{size:,}": ((FILLER * 7)[:490] + "\n\n") * (size // 492) for size in (20_000, 200_000, 400_000, 2_000_000)},
    "of one word": "x" * 1_000_000,
    "of lines": "a\n" * 500_000,
    "which is dense where it matters": "\n\n".join([RARE] * 12 + [FILLER.strip() * 20] * 30),
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_chunk_of_any_size_is_shortened_to_what_it_may_have_and_uses_most_of_it(text: str) -> None:
    empty = len(PAIRS.assemble([], is_complete=False).prompt.token_ids)
    step = PAIRS.assemble([Chunk(text, "1.md")], is_complete=False, is_ranked=False)
    num_tokens = len(step.prompt.token_ids) - empty
    assert PAIRS.max_context_tokens / 6 < num_tokens <= PAIRS.max_context_tokens / 3
    assert (len(step.shortened), step.left_out) == (1, ())


def test_a_chunk_of_which_nothing_fits_beside_its_heading_waits_for_what_is_left() -> None:
    """Here a character is a token, and title and source have more than a chunk may."""
    unwieldy = Chunk(ANSWER * 40, "s" * 500, "t" * 200)
    step = arrived([unwieldy, page(1, 100)], 1536)
    assert [chunk.uri for chunk in step.included] == ["1.md", unwieldy.uri]
    assert step.shortened == (unwieldy,)
    assert num_context_tokens(step) <= 1536


def test_a_single_page_has_the_whole_context_in_the_end() -> None:
    only = page(1, 3500, ANSWER)
    step = arrived([only])
    assert [chunk.uri for chunk in step.included] == ["1.md", "1.md"]
    assert (step.left_out, step.shortened) == ((), ())
    assert sum(chunk.text.count("weather") for chunk in step.included) == only.text.count("weather")


def test_chunks_that_fit_are_whole_and_in_the_order_of_arrival() -> None:
    pages = [page(number, 700) for number in range(5)]
    step = arrived(pages)
    assert (step.included, step.left_out, step.shortened) == (tuple(pages), (), ())


def test_a_ranked_context_is_taken_by_rank() -> None:
    pages = [page(1, 3500), page(2, 3000, ANSWER), page(3, 100)]
    step = assembler().assemble(pages, is_complete=True, is_ranked=True)
    assert (step.included, step.left_out, step.shortened) == ((pages[0], pages[2]), (pages[1],), ())


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 6000), st.sampled_from(["", ANSWER])), max_size=9),
    st.integers(0, 6000),
    st.sampled_from([0.1, 0.25, 0.5, 0.9]),
)
def test_a_streamed_prompt_only_grows_and_is_that_of_one_go_within_its_budget(
    sizes: list[tuple[int, str]], budget: int, reserve_fraction: float
) -> None:
    chunks = [page(number, size, answer) for number, (size, answer) in enumerate(sizes)]
    streaming = assembler(budget, reserve_fraction)
    for end in range(len(chunks) + 1):
        step = streaming.assemble(chunks[:end], is_complete=False, is_ranked=False)
        assert step.num_invalidated == 0
        complete = arrived(chunks[:end], budget, reserve_fraction)
        preview = streaming.preview(chunks[:end], is_ranked=False)
        assert preview == (complete.prompt.token_ids, complete.included)
    last = streaming.assemble(chunks, is_complete=True, is_ranked=False)
    in_one_go = arrived(chunks, budget, reserve_fraction)
    assert last.prompt.token_ids == in_one_go.prompt.token_ids
    assert last.num_invalidated == 0
    assert num_context_tokens(last) <= max(budget, len("(no documents were found)\n\n"))
    sources = {chunk.uri for chunk in last.included}
    assert sources | {chunk.uri for chunk in last.left_out} == {chunk.uri for chunk in chunks}
    assert not sources & {chunk.uri for chunk in last.left_out}


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_query_is_told_what_was_shortened_and_what_was_left_out_once(overlap: bool) -> None:
    pages = [page(number, 3000, ANSWER if number == 7 else "") for number in range(12)]
    random.Random(0).shuffle(pages)
    source = ScriptedSource([Append(each) for each in pages])
    async with Pipeline(source, ScriptedBackend("ok"), overlap=overlap) as pipeline:
        async with pipeline.events(QUESTION, max_context_tokens=BUDGET) as stream:
            events = [event async for event in stream]
    answer = stream.result
    (shortened,) = (event.chunks for event in events if isinstance(event, ChunksShortened))
    (left_out,) = (event.chunks for event in events if isinstance(event, ChunksLeftOut))
    assert (shortened, left_out) == (answer.shortened, answer.left_out)
    assert sorted(chunk.uri for chunk in (*shortened, *left_out)) == sorted(chunk.uri for chunk in pages)
    assert any(ANSWER in citation.text for citation in answer.citations)
    assert answer.num_invalidated == 0


async def test_without_a_late_share_chunks_are_taken_whole_and_by_arrival() -> None:
    first, late = page(1, 3500), page(2, 1000, ANSWER)
    for event in (Append(late), Update((first, late))):
        async with Pipeline(ScriptedSource([Append(first), event]), ScriptedBackend("ok")) as pipeline:
            stream = pipeline.stream(QUESTION, max_context_tokens=BUDGET, reserve_fraction=0)
            assert [chunk async for chunk in stream]
        assert [citation.text for citation in stream.result.citations] == [first.text]
        assert stream.result.left_out == (late,)


@pytest.mark.parametrize("reserve_fraction", [-0.1, 1, float("nan")])
def test_a_share_that_is_none_is_refused(reserve_fraction: float) -> None:
    with pytest.raises(ConfigurationError, match=r"reserve_fraction=.* must be"):
        Pipeline(ScriptedSource([]), ScriptedBackend()).stream("Why?", reserve_fraction=reserve_fraction)


def test_chunks_that_come_one_by_one_are_not_all_asked_about_again_for_each() -> None:
    num_counted = 0

    def count(number: int, chunk: Chunk) -> int:
        nonlocal num_counted
        num_counted += 1
        return len(chunk.text)

    def budget() -> PassageBudget:
        return PassageBudget(BUDGET, count, Relevance(QUESTION), 0.25)

    pages, streaming = [page(number, 100) for number in range(300)], budget()
    for end in range(len(pages) + 1):
        streaming.by_arrival(pages[:end], is_complete=False)
    assert num_counted < 10 * len(pages)
    for changed in (pages[1:], pages[:3], [*pages[:5], *pages[7:]], pages):
        for is_complete in (False, True):
            afresh = budget().by_arrival(changed, is_complete=is_complete)
            assert streaming.by_arrival(changed, is_complete=is_complete) == afresh


WORDS = re.split(" ", "how do i cancel a task group the weather was fine # ``` [1] Question: \n\n \N{NAZAR AMULET}")


def some_events(chance: random.Random) -> list[SourceEvent | Exception]:
    def chunk() -> Chunk:
        text = " ".join(chance.choices(WORDS, k=chance.choice([0, 5, 50, 300, 300, 1500, 1500])))
        score = chance.choice([None, None, 0.5, -1.0, float("nan"), float("inf")])
        source = chance.choice([*"abcde", "s" * 600])
        return Chunk(text, source, chance.choice(["", "t", "Task " * 50]), chance.randrange(3), score)

    def event() -> SourceEvent | Exception:
        kind = chance.random()
        if kind < 0.75:
            return Append(chance.choice(pool) if kind < 0.5 else chunk())
        if kind < 0.85:
            return Update(tuple(chance.choices(pool, k=chance.randrange(8))))
        return chance.choice([Skipped("s", "it is empty"), CutShort("time is up"), RuntimeError("broken")])

    pool = [chunk() for _ in range(chance.randrange(1, 12))]
    return [event() for _ in range(chance.randrange(25))]


@pytest.mark.parametrize("seed", range(60))
async def test_overlap_does_not_change_the_final_prompt_or_the_choice_of_chunks(seed: int) -> None:
    chance = random.Random(seed)
    events, mode = some_events(chance), chance.choice([AppendMode(), UpdateMode()])
    budget, reserve_fraction = (
        chance.choice([0, 10, 100, 600, 1500, 4000]),
        chance.choice([0, 0.1, 0.25, 0.5, 0.9, 0.99]),
    )
    options = QueryOptions(
        max_context_tokens=budget,
        reserve_fraction=reserve_fraction,
        params=SamplingParams(max_tokens=chance.choice([1, 50])),
    )
    max_model_len = chance.choice([700, 2000, 100_000])
    ends: list[tuple[object, ...]] = []
    for overlap in (True, False):
        backend = ScriptedBackend("ok", max_model_len=max_model_len)
        async with Pipeline(ScriptedSource(events), backend, mode=mode, on_source_error="answer") as pipeline:
            stream = pipeline.stream(QUESTION, overlap=overlap, **options)
            assert [chunk async for chunk in stream]
        answer, prompts = stream.result, backend.prompts[-1]
        ends.append((prompts[-1].token_ids, answer.citations, answer.left_out, answer.shortened))
        for before, prompt in pairwise(prompts):
            assert prompt.token_ids[: prompt.num_shared] == before.token_ids[: prompt.num_shared]
        assert len(prompts[-1].token_ids) + options["params"].max_tokens <= max_model_len
    assert str(ends[0]) == str(ends[1])  # NaN is not itself

    write = PromptTemplate().passage_format().format
    sizes = [len(write(c.number, Chunk(c.text, c.uri, c.title))) for c in answer.citations]
    assert sum(sizes) <= budget
    came = list(takewhile(lambda event: not isinstance(event, Exception), events))
    if answer.left_out and reserve_fraction and not any(isinstance(event, Update) for event in came):
        assert max(sizes, default=0) <= max(budget / 3, 512, budget / (len(answer.left_out) + 1))
