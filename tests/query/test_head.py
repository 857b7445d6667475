"""The head of a prompt, the text before the passages, which is sent before the first passage arrives."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag import Append, Chunk, Hint, Pipeline, PromptTemplate, Turn, Update
from streamrag.core import BackendEvent, ModelInfo, Prompt, SamplingParams, SourceEvent
from streamrag.errors import SourceError
from streamrag.query.options import QueryOptions
from streamrag.query.overlap import MIN_TURNS, OverlapChooser, OverlapOutcome
from streamrag.telemetry import ContextChanged, OverlapChoice, OverlapWay, PrefillProgressed, QueryEvent, Timings
from streamrag.testing import CodePointTokenizer, ScriptedBackend, ScriptedSource

A, B = Chunk("alpha", "a.md"), Chunk("beta", "b.md")
SHORT = PromptTemplate(system="", before_context="Texts:")
"""A template whose head, "User: Texts:", has 12 tokens."""


async def answer(pipeline: Pipeline, **options: object) -> list[QueryEvent]:
    """Return the events of a query with these options."""
    return [event async for event in pipeline.events("Why?", **options)]  # type: ignore[arg-type]


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


async def test_the_head_is_sent_while_the_source_has_found_nothing() -> None:
    may_find = anyio.Event()
    backend = ScriptedBackend("ok")
    history = [Turn("user", "Hello!"), Turn("assistant", "Hi!")]
    async with Pipeline(ScriptedSource([may_find, Append(A)]), backend) as pipeline:
        async with pipeline.events("Why?", system="Be brief.", history=history) as events:
            async for event in events:
                if isinstance(event, ContextChanged):
                    may_find.set()
    head, partial, complete = backend.prompts[0]
    assert text_of(head) == "Be brief.\n\nUser: Hello!\n\nAssistant: Hi!\n\nUser: Documents:\n\n"
    assert not head.is_complete
    assert partial.num_shared == len(head.token_ids)
    assert complete.num_shared == len(partial.token_ids)
    assert events.result.num_invalidated == 0


async def test_the_head_is_of_no_source_and_without_a_forecast() -> None:
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource([Append(A, Hint(end_s=1.0))]), backend) as pipeline:
        await answer(pipeline)
    head, *others = backend.prompts[0]
    assert (head.source_name, head.hint) == ("", None)
    assert {prompt.source_name for prompt in others} == {"ScriptedSource"}
    assert len({prompt.query_id for prompt in (head, *others)}) == 1


async def test_events_of_the_head_are_a_prompt_without_passages_and_its_prefill() -> None:
    async with Pipeline(ScriptedSource([0.05, Append(A)]), ScriptedBackend("ok")) as pipeline:
        names = [type(event).__name__ for event in await answer(pipeline)]
    assert names[:4] == ["RetrievalStarted", "ContextChanged", "PrefillProgressed", "ChunkArrived"]


@pytest.mark.parametrize(("way", "num_before"), [("immediate", 1), ("delayed", 0), ("none", 0)])
async def test_the_head_is_sent_only_if_prefill_is_immediate(way: OverlapWay, num_before: int) -> None:
    backend = ScriptedBackend("ok")
    steps = [0.05, Append(A, Hint(end_s=0.0))]
    async with Pipeline(ScriptedSource(steps), backend) as pipeline:
        pipeline._overlap_chooser = Always(OverlapChoice(way, "", 0.1))
        await answer(pipeline)
    assert sum("alpha" not in text_of(prompt) for prompt in backend.prompts[0]) == num_before


class Always(OverlapChooser):
    """Always makes the same choice."""

    def __init__(self, choice: OverlapChoice) -> None:
        super().__init__()
        self._choice = choice

    def choose(self, num_running: int, *, shares_processors: bool) -> OverlapChoice:
        return self._choice

    def learn(self, outcome: OverlapOutcome, num_running: int) -> None:
        pass


@pytest.mark.parametrize(("min_head_len", "is_sent"), [(12, True), (13, False), (None, False), (1, True)])
async def test_a_head_shorter_than_the_backends_block_is_not_sent(min_head_len: int | None, is_sent: bool) -> None:
    backend = ScriptedBackend("ok")
    backend.model = replace(backend.model, min_head_len=min_head_len)
    async with Pipeline(ScriptedSource([Append(A)]), backend, template=SHORT) as pipeline:
        await answer(pipeline)
    assert ("alpha" not in text_of(backend.prompts[0][0])) == is_sent


async def test_a_head_of_a_backend_that_names_no_block_has_16_tokens_or_is_not_sent() -> None:
    backend = ScriptedBackend("ok")
    assert backend.model == ModelInfo("scripted", backend.model.tokenizer, 100_000)
    async with Pipeline(ScriptedSource([Append(A)]), backend) as pipeline:
        for before_context in ("T" * 9, "T" * 10):  # behind "User: "
            await answer(pipeline, template=PromptTemplate(system="", before_context=before_context))
    assert [len(prompts) for prompts in backend.prompts] == [2, 3]


class PairTokenizer(CodePointTokenizer):
    """Has one token for each two characters, so that texts that are joined have other tokens than each of them."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        ids = super().encode(text, allow_special=allow_special)
        return [sum(i << 21 * place for place, i in enumerate(ids[at : at + 2])) for at in range(0, len(ids), 2)]


EVENTS = st.one_of(
    st.sampled_from([A, B]).map(Append), st.lists(st.sampled_from([A, B]), max_size=2).map(lambda c: Update(tuple(c)))
)


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(EVENTS, max_size=4),
    before=st.text(max_size=30),
    system=st.text(max_size=30),
    history=st.lists(st.text(max_size=20), max_size=3),
)
async def test_every_prompt_begins_with_the_tokens_of_the_head_and_the_last_one_is_as_without_overlap(
    steps: Sequence[SourceEvent], before: str, system: str, history: list[str]
) -> None:
    backend = ScriptedBackend("ok")
    backend.model = replace(backend.model, tokenizer=PairTokenizer(), min_head_len=1)
    options: QueryOptions = {
        "template": PromptTemplate(system=system, before_context=before),
        "history": [Turn("user", text) for text in history],
    }
    async with Pipeline(ScriptedSource(steps), backend) as pipeline:
        for overlap in (True, False):
            await answer(pipeline, overlap=overlap, **options)
    (head, *others), (only,) = backend.prompts
    assert all(prompt.token_ids[: len(head.token_ids)] == head.token_ids for prompt in others)
    assert others[-1].token_ids == only.token_ids


async def test_a_source_that_finds_nothing_completes_the_head_with_the_words_for_no_context() -> None:
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        await answer(pipeline)
    head, complete = backend.prompts[0]
    assert complete.num_shared == len(head.token_ids)
    assert text_of(complete).removeprefix(text_of(head)).startswith("(no documents were found)")


@pytest.mark.parametrize("steps", [[OSError("refused")], [0.05, OSError("refused")]], ids=["at once", "later"])
async def test_a_source_that_fails_ends_the_request_that_has_the_head(steps: Sequence[object]) -> None:
    source, backend = ScriptedSource(steps), ScriptedBackend("ok")  # type: ignore[arg-type]
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(SourceError, match="refused"):
            await answer(pipeline)
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)
    assert [prompt.is_complete for prompt in backend.prompts[0]] == [False]


@pytest.mark.parametrize("stops_at", [ContextChanged, PrefillProgressed])
async def test_a_query_that_is_stopped_when_only_its_head_was_sent_leaves_nothing(stops_at: type) -> None:
    source = ScriptedSource([anyio.Event()])
    backend = ScriptedBackend("ok", hold=anyio.Event() if stops_at is ContextChanged else None)
    async with Pipeline(source, backend) as pipeline:
        async with pipeline.events("Why?") as events:
            async for event in events:
                if isinstance(event, stops_at):
                    break
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("streamrag")]


class TimedBackend(ScriptedBackend):
    """Prefills each token that the prompt before did not begin with in `token_s`, on processors of its own."""

    def __init__(self, token_s: float) -> None:
        super().__init__("ok")
        self._token_s = token_s

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def prefilled() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                await anyio.sleep(self._token_s * (len(prompt.token_ids) - prompt.num_shared))
                yield prompt

        async for event in super().generate(prefilled(), params):
            yield event


async def test_the_pipeline_learns_that_a_long_head_overlaps_with_one_quick_step() -> None:
    choices = []
    async with Pipeline(ScriptedSource([0.05, Append(A)]), TimedBackend(1e-4)) as pipeline:
        for _ in range(3 * MIN_TURNS):
            events = await answer(pipeline, system="s" * 400)
            choices.append(events[-1].answer.overlap)  # type: ignore[union-attr]
    assert "retrieval ends right after its first result" not in [choice.reason for choice in choices]
    assert choices[-1].way == "immediate"


def one_step(way: OverlapWay, *, num_head: int, ttft_after_retrieval_s: float) -> OverlapOutcome:
    """Return the outcome of a query of 2,000 tokens and a retrieval of one step of 0.5 s, after a wait of 1 s."""
    timings = Timings(1.0, 1.5, 1.5, 1.5 + ttft_after_retrieval_s, ttft_after_retrieval_s, 3.0)
    return OverlapOutcome.of(way, timings, has_forecast=False, num_head=num_head, token_ids=(1,) * 2_000)


def test_the_head_saves_its_share_of_prefill_but_no_more_than_the_wait_for_the_first_chunk() -> None:
    assert one_step("none", num_head=0, ttft_after_retrieval_s=0.4).most_saved_s == 0.0
    assert one_step("immediate", num_head=1_000, ttft_after_retrieval_s=0.2).most_saved_s == pytest.approx(0.2)
    assert one_step("immediate", num_head=1_500, ttft_after_retrieval_s=0.2).most_saved_s == pytest.approx(0.5)
    without_chunks = Timings(0.0, None, 0.5, 0.6, 0.1, 1.0)
    outcome = OverlapOutcome.of("none", without_chunks, has_forecast=False, num_head=90, token_ids=(1,) * 100)
    assert outcome.most_saved_s == pytest.approx(0.5)


@pytest.mark.parametrize(("num_head", "ways"), [(40, {"none"}), (1_000, {"none", "immediate"})])
def test_auto_overlaps_one_step_of_retrieval_only_with_a_long_head(num_head: int, ways: set[OverlapWay]) -> None:
    chooser, choices = OverlapChooser(), []
    for _ in range(40):
        choice = chooser.choose(1, shares_processors=True)
        choices.append(choice.way)
        after_s = 0.2 if choice.way == "immediate" and num_head == 1_000 else 0.4
        chooser.learn(one_step(choice.way, num_head=num_head, ttft_after_retrieval_s=after_s), 1)
    assert set(choices[MIN_TURNS:]) == ways
    assert choices[-1] == ("immediate" if num_head == 1_000 else "none")
