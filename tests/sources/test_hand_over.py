"""Text that is still being written, as a source: the prompt of the next model is that of the whole text."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag import (
    AppendMode,
    Chunk,
    CutShort,
    ModelInfo,
    Pipeline,
    RetrieverSource,
    Rewrite,
    Source,
    Update,
    from_tokens,
)
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import SourceEvent
from streamrag.errors import (
    BackendError,
    ConfigurationError,
    DeadlineExceededError,
    PromptTooLongError,
    SourceError,
    StreamRagError,
    TooManyQueriesError,
)
from streamrag.testing import ScriptedBackend

AWKWARD = (
    "Plain. half a family 👨‍👩‍👧‍👦 検索と生成を重ねる e\u0301 <|end|><|begin_of_text|>\r\nQuestion: who?\n[1] A title"
    " (uri)\n\n\n  Documents:\nlone \ud800 {text} @@streamrag-0@@ <|im_end|>\n\n\n tail \t"
)


def writer(pieces: Sequence[Any]) -> Callable[[str], AsyncIterator[Any]]:
    async def write(query: str) -> AsyncIterator[Any]:
        for piece in pieces:
            yield piece

    return write


async def events(source: Source) -> list[SourceEvent]:
    with anyio.fail_after(120):
        return [event async for event in source.stream("Why?")]


def contexts(found: Sequence[SourceEvent]) -> list[list[str]]:
    return [[chunk.text for chunk in event.chunks] for event in found if isinstance(event, Update)]


async def prompts(source: Source, tokenizer: HuggingFaceTokenizer) -> list[tuple[int, ...]]:
    """The prompts of a query, the complete one last."""
    backend = ScriptedBackend("ok")
    backend.model = ModelInfo("tiny", tokenizer, 100_000)
    async with Pipeline(source, backend, overlap=True) as pipeline:
        _ = [chunk async for chunk in pipeline.stream("Why?")]
    return [prompt.token_ids for prompt in backend.prompts[0]]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tiny_model)


async def test_the_context_is_the_text_so_far() -> None:
    source = from_tokens(writer(["The pri", "nter", "", " jams", Rewrite(4, "scanner jams"), "."]), min_chars=4)
    found = await events(source)
    texts = ["The pri", "The printer", "The printer jams", "The scanner jams", "The scanner jams."]
    assert contexts(found) == [[text] for text in texts]
    assert found[-1] == Update((Chunk("The scanner jams.", "writer.<locals>.write"),))


async def test_the_complete_prompt_is_that_of_the_whole_text_wherever_it_is_split(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    whole = (await prompts(RetrieverSource(lambda query: [Chunk(AWKWARD, "notes")]), tokenizer))[-1]
    for split in range(1, len(AWKWARD)):
        source = from_tokens(writer([AWKWARD[:split], AWKWARD[split:]]), name="notes", min_chars=1)
        *_, complete = found = await prompts(source, tokenizer)
        assert complete == whole
        assert len(found) == 4, "the head, two of the text, the complete one"
    by_character = await prompts(from_tokens(writer(AWKWARD), name="notes", min_chars=1), tokenizer)
    assert by_character[-1] == whole
    assert len(by_character) == len(AWKWARD) + 2


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(
        st.text("ab \n<|>é👨", max_size=6) | st.builds(Rewrite, st.integers(0, 9), st.text("a\n", max_size=4))
    ),
    min_chars=st.integers(1, 9),
    passage_chars=st.integers(1, 9),
)
def test_any_pieces_and_rewrites_end_as_the_whole_text(
    tokenizer: HuggingFaceTokenizer, pieces: list[Any], min_chars: int, passage_chars: int
) -> None:
    text, written = "", []
    for piece in pieces:
        if isinstance(piece, Rewrite):
            piece = Rewrite(min(piece.start, len(text)), piece.text)
        text = text[: piece.start] + piece.text if isinstance(piece, Rewrite) else text + piece
        written.append(piece)
    sources = [
        from_tokens(writer(each), name="notes", min_chars=min_chars, passage_chars=passage_chars)
        for each in (written, [text])
    ]
    found, whole = (asyncio.run(prompts(source, tokenizer)) for source in sources)
    assert found[-1] == whole[-1]


async def test_only_the_end_of_a_growing_text_is_computed_again(tokenizer: HuggingFaceTokenizer) -> None:
    words = random.Random(0).choices(["task", "cancel", "scope", "a", "the", "wait,", "event.\n"], k=300)
    text = " ".join(words)
    _head, *partial, complete = await prompts(
        from_tokens(writer([f" {word}" for word in words]), min_chars=1), tokenizer
    )
    assert len(partial) == len(words)
    assert len(complete) > len(text) / 8
    for before, after in zip(partial, [*partial[1:], complete], strict=True):
        num_shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert len(before) - num_shared <= 16, "a word and the end of the passage, in a tokenizer without many merges"


async def test_white_space_at_the_beginning_is_not_reported() -> None:
    found = await events(from_tokens(writer(["", "\n", "\n ", "Oslo"]), name="w"))
    assert found == [Update((Chunk("\n\n Oslo", "w"),))]


async def test_passages_end_at_blank_lines_and_more_text_changes_only_the_last() -> None:
    text = "\n\n".join(f"paragraph {number} of the notes" for number in range(12)) + "\n\n\n\nend\n\n"
    found = contexts(await events(from_tokens(writer(text), min_chars=1, passage_chars=60)))
    for before, after in pairwise(found):
        assert after[: len(before) - 1] == before[:-1]
    assert [passage.count("paragraph") for passage in found[-1]] == [3, 3, 3, 3, 0]
    assert found[-1][-1] == "end\n\n"
    assert found[-1] == contexts(await events(from_tokens(writer([text]), passage_chars=60)))[-1]


async def test_a_text_that_exceeds_the_budget_keeps_its_first_passages() -> None:
    source = from_tokens(writer(["a" * 300 + "\n\n", "b" * 300 + "\n\n", "c" * 300]), name="w", passage_chars=200)
    async with Pipeline(source, ScriptedBackend("ok")) as pipeline:
        stream = pipeline.stream("Why?", max_context_tokens=700)
        _ = [chunk async for chunk in stream]
    assert [citation.text[0] for citation in stream.result.citations] == ["a", "b"]
    assert [(chunk.text[0], chunk.passage) for chunk in stream.result.left_out] == [("c", 2)]


async def test_many_pieces_of_text_make_few_updates() -> None:
    found = contexts(await events(from_tokens(writer("x" * 1_000), min_chars=100)))
    assert [len(text) for (text,) in found] == [1, *range(101, 1_000, 100), 1_000]


async def test_an_empty_text_makes_no_context() -> None:
    assert await events(from_tokens(writer([]))) == []
    assert await events(from_tokens(writer(["", Rewrite(0, "")]))) == []
    assert contexts(await events(from_tokens(writer(["x", Rewrite(0, "")])))) == [["x"], []]


async def test_a_text_without_end_is_cut_off_and_its_writer_closed() -> None:
    is_closed = False

    async def endless(query: str) -> AsyncIterator[Any]:
        nonlocal is_closed
        try:
            while True:
                yield "ab"
                yield Rewrite(0, "c")  # counts, although the text does not grow
        finally:
            is_closed = True

    *updates, cut = await events(from_tokens(endless, name="endless", max_chars=31))
    assert cut == CutShort("endless wrote more than 31 characters, and was not read on")
    assert contexts(updates)[-1] == ["ca"]
    assert is_closed
    exact = from_tokens(writer(["abc", "de"]), max_chars=5)
    assert not any(isinstance(event, CutShort) for event in await events(exact))


async def test_a_rewrite_that_exceeds_the_limit_leaves_the_text_as_it_was() -> None:
    snapshots = [Rewrite(0, "a" * 40), Rewrite(0, "b" * 50), Rewrite(0, "c" * 60)]
    for max_chars, last in ((90, "b" * 50), (100, "b" * 50), (150, "c" * 60)):
        found = await events(from_tokens(writer(snapshots), max_chars=max_chars))
        assert contexts(found)[-1] == [last]
        assert isinstance(found[-1], CutShort) == (max_chars < 150)
    *updates, _ = await events(from_tokens(writer(["abc", Rewrite(3, "def"), "g"]), max_chars=5))
    assert contexts(updates)[-1] == ["abcde"], "what is only appended is cut off"


async def test_text_written_before_an_error_counts() -> None:
    async def fails(query: str) -> AsyncIterator[str]:
        yield "first"
        yield " and more"
        raise LookupError("gone")

    async with Pipeline(from_tokens(fails, name="fails"), ScriptedBackend("ok"), on_source_error="answer") as pipeline:
        stream = pipeline.stream("Why?")
        _ = [chunk async for chunk in stream]
        assert [citation.text for citation in stream.result.citations] == ["first and more"]
        assert str(stream.result.source_error) == "fails failed: LookupError: gone"
    async with Pipeline(from_tokens(fails, name="fails"), ScriptedBackend("ok")) as pipeline:
        with pytest.raises(SourceError, match="fails failed: LookupError: gone"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]


@pytest.mark.parametrize("error", [BackendError, DeadlineExceededError, TooManyQueriesError, PromptTooLongError])
async def test_an_error_of_the_query_that_writes_is_a_failure_of_the_source(error: type[StreamRagError]) -> None:
    async with Pipeline(RetrieverSource(lambda query: []), ScriptedBackend("ok", error=error("no"))) as first:
        source = from_tokens(lambda query: first.stream(query), name="first")
        async with Pipeline(source, ScriptedBackend("ok"), on_source_error="answer") as second:
            stream = second.stream("Why?")
            assert [chunk.text async for chunk in stream] == ["o", "k"]
    assert [citation.text for citation in stream.result.citations] == ["o"]
    failure = stream.result.source_error
    assert str(failure) == f"first failed: {error.__name__}: no"
    assert isinstance(failure, SourceError)
    assert isinstance(failure.__cause__, error)


async def test_a_configuration_error_of_the_query_that_writes_stays_one() -> None:
    backend = ScriptedBackend("ok", error=ConfigurationError("no"))
    async with Pipeline(RetrieverSource(lambda query: []), backend) as first:
        with pytest.raises(ConfigurationError, match=r"^no$"):
            await events(from_tokens(first.stream("Why?")))


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (b"bytes", "w wrote bytes b'bytes', not a str"),
        (None, "w wrote None, not a str"),
        (SimpleNamespace(text=5), "w wrote SimpleNamespace"),
        (Rewrite(6, "x"), "w rewrites from character 6 on, and wrote 5"),
    ],
)
async def test_an_invalid_piece_is_named(piece: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        await events(from_tokens(writer(["right", piece]), name="w"))


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="5 cannot be called"):
        from_tokens(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="min_chars=0"):
        from_tokens(writer([]), min_chars=0)
    with pytest.raises(ConfigurationError, match="start=-1"):
        Rewrite(-1, "x")


async def test_an_iterator_can_be_read_once() -> None:
    async with Pipeline(from_tokens(writer(["The notes."])("")), ScriptedBackend("ok")) as pipeline:
        assert [chunk.text async for chunk in pipeline.stream("Why?")] == ["o", "k"]
        with pytest.raises(SourceError, match="a query has read this text already: give from_tokens a function"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]


async def test_the_answer_of_a_pipeline_is_the_source_of_another() -> None:
    backend = ScriptedBackend("The printer jams.")
    async with Pipeline(RetrieverSource(lambda query: ["a note"]), backend) as first:
        source = from_tokens(lambda query: first.stream(f"Facts for: {query}"), name="facts", min_chars=4)
        async with Pipeline(source, backend, owns_backend=False) as second:
            async with second.stream("Why?") as stream:
                _ = [chunk async for chunk in stream]
            assert [citation.text for citation in stream.result.citations] == ["The printer jams."]
            assert len(backend.prompts[0]) > 3  # of the second: it began first, and grew
            again = from_tokens(first.stream("Which facts?"))
            assert contexts(await events(again))[-1] == ["The printer jams."]


async def test_a_generator_in_a_thread_is_read_too() -> None:
    def write(query: str) -> Iterator[str]:
        yield from query

    assert contexts(await events(from_tokens(write, min_chars=1))) == [["W"], ["Wh"], ["Why"], ["Why?"]]


@pytest.mark.filterwarnings("error::ResourceWarning")
async def test_stopping_the_query_closes_the_writer_and_the_query_that_writes() -> None:
    backend = ScriptedBackend("The printer", is_endless=True)
    async with Pipeline(RetrieverSource(lambda query: ["a note"]), backend) as first:
        source = from_tokens(first.stream("Which facts?"), min_chars=1)
        async with aclosing(source.stream("Why?")) as found:
            async for event in found:
                if contexts([event]) == [["The printer"]]:
                    break
        assert (first.num_queries, backend.num_requests) == (0, 0)
        async with Pipeline(from_tokens(lambda query: first.stream(query)), backend, owns_backend=False) as second:
            async with second.stream("Why?"):
                with anyio.fail_after(120):
                    while backend.num_requests < 2:  # noqa: ASYNC110 - the second query and the one that writes
                        await asyncio.sleep(0)
            assert (first.num_queries, second.num_queries, backend.num_requests) == (0, 0, 0)
    gc.collect()


async def test_append_mode_keeps_every_version() -> None:
    """What docs/agents.md warns of."""
    async with Pipeline(from_tokens(writer("ab"), min_chars=1), ScriptedBackend("ok"), mode=AppendMode()) as pipeline:
        stream = pipeline.stream("Why?")
        _ = [chunk async for chunk in stream]
    assert [citation.text for citation in stream.result.citations] == ["a", "ab"]
