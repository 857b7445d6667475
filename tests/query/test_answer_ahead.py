"""Drafts of an answer while its context changes: which are asked for, what is told, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import anyio
import pytest

from streamrag import AnswerChunk, Append, Chunk, Pipeline, Prompt, SamplingParams, Update
from streamrag.core import BackendEvent
from streamrag.errors import BackendError, ConfigurationError
from streamrag.query.options import MAX_DRAFT
from streamrag.records import RequestRecord
from streamrag.telemetry import DraftChanged, DraftUse, QueryEvent, TokensGenerated
from streamrag.testing import ScriptedBackend, ScriptedSource

A, B, C = (Chunk(text, f"{text[0]}.md") for text in ("alpha", "beta", "gamma"))
PAUSE_S = 0.05


class DraftingBackend(ScriptedBackend):
    """Verifies drafts; its answer begins with the last chunk's name. `fails` are the classes of requests that fail."""

    def __init__(self, *fails: str, pause_s: float = 0.0) -> None:
        super().__init__()
        self.model = replace(self.model, verifies_drafts=True)
        self.fails = fails
        self.pause_s = pause_s

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        received: list[Prompt] = []
        self.prompts.append(received)
        self.num_requests += 1
        try:
            async for prompt in prompts:
                received.append(prompt)
                if prompt.request_class in self.fails:
                    raise BackendError("broken")
            text = self.model.tokenizer.decode(received[-1].token_ids)
            answer = "see " + max(("alpha", "beta", "gamma"), key=text.rfind)
            for number, letter in enumerate(answer, start=1):
                await anyio.sleep(self.pause_s)
                yield AnswerChunk(letter, (ord(letter),), "stop" if number == len(answer) else None)
        finally:
            self.num_requests -= 1

    @property
    def drafts(self) -> list[Prompt]:
        """The prompts of all drafts, in order."""
        return [prompts[0] for prompts in self.prompts if prompts and prompts[0].request_class == "draft"]

    @property
    def last(self) -> Prompt:
        """The complete prompt of the query."""
        (prompt,) = [p for prompts in self.prompts for p in prompts if p.is_complete and p.request_class == "pool"]
        return prompt


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


async def events_of(pipeline: Pipeline, **options: object) -> tuple[list[QueryEvent], DraftUse | None]:
    """By default at a temperature at which drafts are verified, and never are the answer as they are."""
    options = {"params": SamplingParams(temperature=1.0), **options}
    stream = pipeline.events("What?", answer_ahead=True, **options)  # type: ignore[arg-type]
    events = [event async for event in stream]
    return events, stream.result.draft


async def test_a_draft_waits_for_a_context_that_lasts_longer_than_one_in_which_nothing_was_drafted() -> None:
    """The first draft has no token when the context changes: the second one waits as long, and is never asked for."""
    source = ScriptedSource([Append(A), 1.0, Append(B), 0.01, Append(C), 3.0])
    backend = DraftingBackend(pause_s=1.5)
    async with Pipeline(source, backend, overlap=True) as pipeline:
        await events_of(pipeline)
    assert [bytes(draft.token_ids).count(b"gamma") for draft in backend.drafts] == [0, 1]
    assert backend.last.draft[:1] == ids("s")


async def test_each_context_is_drafted_and_the_complete_prompt_comes_with_the_last_draft() -> None:
    source, backend = ScriptedSource([Append(A), PAUSE_S, Append(B), PAUSE_S]), DraftingBackend()
    async with Pipeline(source, backend, overlap=True) as pipeline:
        events, use = await events_of(pipeline)
    first, second = backend.drafts
    assert (first.draft, second.draft, backend.last.draft) == ((), ids("see alpha"), ids("see beta"))
    assert backend.last.token_ids == second.token_ids  # the context did not change any more
    assert all(draft.is_complete for draft in backend.drafts)
    assert use == DraftUse(num_drafted=len("see beta"))
    shown = [event for event in events if isinstance(event, DraftChanged)]
    assert [event.text for event in shown][-1] == "see beta"
    assert shown[-1].chunks == (A, B)
    assert "see alpha" in [event.text for event in shown if event.chunks == (A,)]
    assert backend.num_requests == 0


async def test_a_new_context_keeps_what_was_drafted_before_and_does_not_show_less_than_before() -> None:
    source = ScriptedSource([Append(A), PAUSE_S, Update((B,)), 0.01, Update((B, A)), PAUSE_S])
    backend = DraftingBackend(pause_s=0.002)
    async with Pipeline(source, backend, overlap=True) as pipeline:
        events, _ = await events_of(pipeline)
    assert backend.drafts[-1].draft  # that of B was withdrawn, perhaps before it was finished
    texts = [event.text for event in events if isinstance(event, DraftChanged)]
    assert not any(old.startswith(new) for old, new in pairwise(texts))
    assert texts[-1] == "see alpha"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_finished_draft_of_the_complete_prompt_is_the_answer_if_nothing_is_random(temperature: float) -> None:
    source, backend = ScriptedSource([Append(A), PAUSE_S]), DraftingBackend()
    async with Pipeline(source, backend, overlap=True) as pipeline:
        events, use = await events_of(pipeline, params=SamplingParams(temperature=temperature))
    answer = events[-1].answer  # type: ignore[union-attr]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("see alpha", ids("see alpha"), "stop")
    assert "".join(event.text for event in events if isinstance(event, TokensGenerated)) == "see alpha"
    assert [citation.uri for citation in answer.citations] == ["a.md"]
    was_sent = [any(prompt.is_complete for prompt in prompts) for prompts in backend.prompts]
    assert was_sent == [temperature > 0, True]  # the query's, and the draft's
    assert use == (DraftUse(9) if temperature else DraftUse(9, 9, 9))
    assert backend.num_requests == 0


class StoppedBackend(DraftingBackend):
    """A token inside a verified draft ends its answers, and its record counts what was accepted behind that too."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            assert isinstance(event, AnswerChunk)
            yield replace(event, record=RECORD) if event.finish_reason else event


RECORD = RequestRecord("1", "finished", True, 0, 0, 0, 0, 0, 0, 10, 8, 10, 0, 0, 0, num_verified=29, num_accepted=29)


async def test_no_more_is_accepted_than_the_answer_has() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), StoppedBackend()) as pipeline:
        stream = pipeline.stream("What?", draft="see alpha and much more")
        assert [chunk async for chunk in stream]
    assert stream.result.draft == DraftUse(num_drafted=23, num_verified=29, num_accepted=len("see alpha"))


async def test_a_draft_of_an_earlier_context_or_an_unfinished_one_is_not_the_answer() -> None:
    for script, pause_s, text in (
        ([Append(A), PAUSE_S, Append(B)], 0.004, "see beta"),
        ([Append(A), PAUSE_S], 0.02, "see alpha"),
    ):
        backend = DraftingBackend(pause_s=pause_s)
        async with Pipeline(ScriptedSource(script), backend, overlap=True) as pipeline:
            events, use = await events_of(pipeline, params=SamplingParams())
        assert events[-1].answer.text == text  # type: ignore[union-attr]
        assert backend.last.draft
        assert use == DraftUse(len(backend.last.draft))


@pytest.mark.parametrize("how", ["raises another error", "ends", "goes on"])
async def test_the_draft_is_the_answer_even_if_the_backend_then_fails_or_ends(how: str) -> None:
    class Careless(DraftingBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            try:
                async for event in super().generate(prompts, params):
                    yield event
            except asyncio.CancelledError as error:
                if how == "raises another error":
                    raise RuntimeError("the request was aborted") from error
                if how == "goes on":
                    yield AnswerChunk("more", (1,), "stop")

    async with Pipeline(ScriptedSource([Append(A), PAUSE_S]), Careless(), overlap=True) as pipeline:
        events, use = await events_of(pipeline, params=SamplingParams())
    assert events[-1].answer.text == "see alpha"  # type: ignore[union-attr]
    assert use == DraftUse(9, 9, 9)


async def test_the_request_whose_answer_is_known_is_stopped_and_sees_no_error() -> None:
    class Watchful(DraftingBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            try:
                async for event in super().generate(prompts, params):
                    yield event
            except BaseException as error:
                ends.append(type(error))
                raise

    ends: list[type[BaseException]] = []
    tasks = asyncio.all_tasks()
    source, backend = ScriptedSource([Append(A), PAUSE_S]), Watchful()
    async with Pipeline(source, backend, overlap=True) as pipeline:
        _, use = await events_of(pipeline, params=SamplingParams())
        assert (backend.num_requests, source.num_streams, pipeline.num_queries) == (0, 0, 0)
    assert use == DraftUse(9, 9, 9)
    assert ends == [asyncio.CancelledError]
    assert asyncio.all_tasks() == tasks


async def test_a_chunk_that_does_not_change_the_prompt_does_not_interrupt_its_draft() -> None:
    source = ScriptedSource([Append(A), 0.05, Update((A,)), 0.05, Update((A,)), 1.0])
    backend = DraftingBackend(pause_s=0.03)
    async with Pipeline(source, backend, overlap=True) as pipeline:
        await events_of(pipeline)
    assert len(backend.drafts) == 1
    assert backend.last.draft == ids("see alpha")


async def test_a_draft_has_the_context_that_the_answer_would_have_if_retrieval_ended_now() -> None:
    """A partial prompt leaves room for late chunks, which are chosen last: a draft has those of the moment."""
    source = ScriptedSource([Append(Chunk(f"alpha {n} " + "a" * 300, f"{n}.md")) for n in range(5)] + [0.2])
    backend = DraftingBackend()
    async with Pipeline(source, backend, overlap=True) as pipeline:
        await events_of(pipeline, max_context_tokens=1200, reserve_fraction=0.5)
    partial = [p for prompts in backend.prompts for p in prompts if not p.is_complete]
    assert len(partial[-1].token_ids) < len(backend.last.token_ids) - 600
    assert backend.drafts[-1].token_ids == backend.last.token_ids


async def test_a_context_without_chunks_is_not_drafted() -> None:
    backend = DraftingBackend()
    async with Pipeline(ScriptedSource([PAUSE_S]), backend, overlap=True) as pipeline:
        _, use = await events_of(pipeline)
    assert backend.drafts == []
    assert backend.last.draft == ()
    assert use == DraftUse()


async def test_a_draft_that_fails_does_not_fail_the_query() -> None:
    source, backend = ScriptedSource([Append(A), PAUSE_S, Append(B), PAUSE_S]), DraftingBackend("draft")
    async with Pipeline(source, backend, overlap=True) as pipeline:
        _, use = await events_of(pipeline)
    assert len(backend.drafts) == 1
    assert use == DraftUse()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.08])
async def test_a_query_that_is_left_leaves_no_draft_behind(after_s: float) -> None:
    source = ScriptedSource([Append(A), PAUSE_S, Append(B), PAUSE_S])
    backend = DraftingBackend(pause_s=0.01)
    async with Pipeline(source, backend, overlap=True) as pipeline:
        with anyio.move_on_after(after_s):
            await events_of(pipeline)
        assert (backend.num_requests, source.num_streams, pipeline.num_queries) == (0, 0, 0)


async def test_without_overlap_or_with_a_grammar_there_is_no_draft_and_the_answer_says_why() -> None:
    for options, reason in (
        ({"overlap": False}, 'overlap "none"'),
        ({"params": SamplingParams(json_schema={"type": "object"})}, "grammar"),
        ({"params": SamplingParams(extra={"structured_outputs": {"regex": "a*"}})}, "grammar"),
    ):
        backend = DraftingBackend()
        async with Pipeline(ScriptedSource([Append(A), PAUSE_S]), backend, overlap=True) as pipeline:
            _, use = await events_of(pipeline, **options)
        assert backend.drafts == []
        assert use is not None
        assert reason in (use.why_none or "")


async def test_a_backend_that_verifies_no_drafts_says_so_and_without_the_option_there_are_none() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend(), answer_ahead=True) as pipeline:
        with pytest.raises(ConfigurationError, match=r"VllmBackend\(answer_ahead=True\)"):
            await events_of(pipeline)
        stream = pipeline.stream("What?", answer_ahead=False)
        assert [chunk async for chunk in stream]
        assert stream.result.draft is None


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft", ["see alpha", [*map(ord, "see alpha")]])
async def test_a_given_draft_comes_with_the_complete_prompt_only(draft: object, overlap: bool) -> None:
    backend = DraftingBackend()
    async with Pipeline(ScriptedSource([Append(A), PAUSE_S, Append(B)]), backend) as pipeline:
        stream = pipeline.stream("What?", draft=draft, overlap=overlap)  # type: ignore[arg-type]
        assert [chunk async for chunk in stream]
        assert stream.result.draft == DraftUse(num_drafted=len("see alpha"))
    assert backend.drafts == []
    assert backend.last.draft == ids("see alpha")
    assert all(prompt.draft == () for prompts in backend.prompts for prompt in prompts if not prompt.is_complete)


async def test_the_first_draft_verifies_a_given_one_and_without_passages_it_is_kept() -> None:
    backend = DraftingBackend()
    async with Pipeline(ScriptedSource([Append(A), PAUSE_S]), backend, overlap=True) as pipeline:
        await events_of(pipeline, draft="see beta")
    assert [draft.draft for draft in backend.drafts] == [ids("see beta")]
    assert backend.last.draft == ids("see alpha")
    backend = DraftingBackend()
    async with Pipeline(ScriptedSource([PAUSE_S]), backend, overlap=True) as pipeline:
        await events_of(pipeline, draft="see beta")
    assert backend.last.draft == ids("see beta")


async def test_a_given_draft_that_no_engine_verifies_changes_nothing_and_the_answer_says_why() -> None:
    grammar = SamplingParams(json_schema={"type": "object"})
    for backend, params, reason in (
        (ScriptedBackend(), SamplingParams(), r"VllmBackend(answer_ahead=True)"),
        (DraftingBackend(), grammar, "grammar"),
    ):
        async with Pipeline(ScriptedSource([Append(A)]), backend) as pipeline:
            stream = pipeline.stream("What?", draft="see alpha", params=params)
            assert [chunk async for chunk in stream]
        assert stream.result.draft is not None
        assert reason in (stream.result.draft.why_none or "")
        assert stream.result.draft.num_drafted == 0
        assert backend.prompts[-1][-1].draft == ()


@pytest.mark.parametrize("draft", [5, [-1], ["see"], [True], "a" * (MAX_DRAFT + 1), [1] * (MAX_DRAFT + 1), [1 << 40]])
async def test_a_draft_is_a_text_or_token_ids_of_bounded_length(draft: object) -> None:
    async with Pipeline(ScriptedSource([Append(A)]), DraftingBackend()) as pipeline:
        with pytest.raises(ConfigurationError, match="draft"):
            pipeline.stream("What?", draft=draft)  # type: ignore[arg-type]


class StuckBackend(DraftingBackend):
    """Never gets further than the first four letters of an answer that is drafted from B."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        num_letters = 0
        async for event in super().generate(prompts, params):
            yield event
            num_letters += 1
            if num_letters == 4 and len(self.drafts) == 2 and self.num_requests == 2:
                await anyio.sleep_forever()


async def test_a_draft_that_is_withdrawn_in_the_middle_keeps_the_rest_of_the_one_before() -> None:
    source, backend = ScriptedSource([Append(A), PAUSE_S, Append(B), PAUSE_S]), StuckBackend()
    async with Pipeline(source, backend, overlap=True) as pipeline:
        await events_of(pipeline, draft="see alpha and more")
    assert backend.drafts[1].draft == ids("see alpha")  # finished: nothing of the given one is left behind it
    assert backend.last.draft == ids("see ") + ids("alpha")
