"""Retrieval in mid-answer: each segment is exact, what was shown stays, and nothing is left behind."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import anyio
import pytest

from streamrag import AnswerChunk, Append, Chunk, Pipeline, Prompt, SamplingParams
from streamrag.core import BackendEvent, ModelInfo, SourceEvent, TokenUsage, Turn, plain_chat
from streamrag.errors import BackendError, ConfigurationError, DeadlineExceededError, SourceError
from streamrag.refresh import Refresh, latest_text
from streamrag.telemetry import Answer, ContextRefreshed, QueryEvent, RefreshSkipped, TokensGenerated
from streamrag.testing import ScriptedSource

END = 0
QUESTION = "Wo liegt das?"
PAUSE_S = 0.004
OFTEN = 4


class ByteTokenizer:
    """One token for each byte, so that most characters of this model's answers have several tokens."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return plain_chat(turns)


def whole_characters(token_ids: Sequence[int]) -> str:
    """The text of the tokens without an incomplete character at the end."""
    return bytes(token_ids).decode(errors="ignore")


class HashingBackend:
    """Each character follows from all tokens before it: any difference in the prompt changes the answer.

    As an engine does, it yields text when a character is complete. `most` tokens come in one chunk.
    """

    def __init__(self, *, pause_s: float = PAUSE_S, most: int = 1) -> None:
        self.model = ModelInfo("hashing", ByteTokenizer(), 4_000)
        self.requests: list[tuple[Prompt, SamplingParams]] = []
        self.num_requests = 0
        self.error: Exception | None = None
        self._pause_s = pause_s
        self._most = most

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next tokens; a character that the prompt leaves incomplete is completed first."""
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            done = [*prompt, *token_ids]
            begin = len(done)
            while begin and done[begin - 1] & 0xC0 == 0x80:
                begin -= 1
            begin -= bool(begin and done[begin - 1] & 0xC0 == 0xC0)
            character = self._character(done[:begin])
            if len(done) - begin >= len(character) or bytes(done[begin:]) != character[: len(done) - begin]:
                character, begin = self._character(done), len(done)
            token_ids.append(character[len(done) - begin])
        return token_ids

    @staticmethod
    def _character(token_ids: Sequence[int]) -> bytes:
        digest = hashlib.blake2b(bytes(token_ids), digest_size=2).digest()
        return ("äöü€🙂aeinrst dlk"[digest[0] % 16]).encode()

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        self.num_requests += 1
        try:
            async for prompt in prompts:
                if prompt.is_complete:
                    self.requests.append((prompt, params))
            if prompt.request_class == "stream" and self.error is not None:
                raise self.error
            token_ids = self.continuation(prompt.token_ids, params.max_tokens)
            text, end, rng = "", 0, random.Random(len(token_ids))
            while end < len(token_ids):
                await asyncio.sleep(self._pause_s)
                begin, end = end, min(end + rng.randint(1, self._most), len(token_ids))
                new = whole_characters(token_ids[:end]).removeprefix(text)
                text += new
                chunk = AnswerChunk(new, tuple(token_ids[begin:end]))
                usage = TokenUsage(len(prompt.token_ids), end)
                yield chunk if end < len(token_ids) else replace(chunk, finish_reason="length", usage=usage)
        finally:
            self.num_requests -= 1

    @property
    def answering(self) -> list[tuple[Prompt, SamplingParams]]:
        """The requests of the segments, without those that only prefill."""
        return [(prompt, params) for prompt, params in self.requests if prompt.request_class != "stream"]


class GrowingSource:
    """Finds one more page at each retrieval, and the earlier ones. `error` is raised by all but the first."""

    def __init__(self, *, retrieval_s: float = 0.005, error: BaseException | None = None, num_chars: int = 20) -> None:
        self.queries: list[str] = []
        self.num_streams = 0
        self._retrieval_s = retrieval_s
        self._error = error
        self._num_chars = num_chars

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        self.queries.append(query)
        self.num_streams += 1
        try:
            await asyncio.sleep(self._retrieval_s)
            if self._error is not None and len(self.queries) > 1:
                raise self._error
            for number in range(len(self.queries)):
                yield Append(Chunk(f"Seite {number} " * (self._num_chars // 8), f"{number}.md"))
        finally:
            self.num_streams -= 1


def often(**options: object) -> Refresh:
    """With a short stride, and at any cost, so that slow machines make no difference."""
    return Refresh(**{"every_tokens": OFTEN, "max_cost": 1e9, **options})  # type: ignore[arg-type]


async def ask(
    pipeline: Pipeline, refresh: Refresh | None, max_tokens: int = 60, **options: object
) -> tuple[list[QueryEvent], Answer]:
    params = SamplingParams(max_tokens=max_tokens)
    stream = pipeline.events(QUESTION, **{"refresh": refresh, "params": params, **options})  # type: ignore[arg-type]
    events = [event async for event in stream]
    return events, stream.result


def of_kind(events: Sequence[QueryEvent], kind: type) -> list[QueryEvent]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("most", [1, 5])
async def test_each_segment_is_the_one_shot_continuation_and_the_text_is_that_of_all_tokens(most: int) -> None:
    source, backend = GrowingSource(), HashingBackend(most=most, pause_s=0.01 if most > 1 else PAUSE_S)
    async with Pipeline(source, backend) as pipeline:
        events, answer = await ask(pipeline, often(), max_tokens=120)
    assert len(answer.segments) == 5, "the first one, and one for each of max_retrievals=4"
    ends = [*(each.first_token for each in answer.segments[1:]), 120]
    for segment, end, (prompt, params) in zip(answer.segments, ends, backend.answering, strict=True):
        so_far = answer.token_ids[: segment.first_token]
        assert prompt.token_ids[len(prompt.token_ids) - len(so_far) :] == so_far, "what was shown stays"
        new = backend.continuation(prompt.token_ids, 120)[: end - segment.first_token]
        assert answer.token_ids[segment.first_token : end] == tuple(new)
        assert params.max_tokens == 120 - segment.first_token
    assert (len(answer.token_ids), answer.finish_reason) == (120, "length")
    assert (
        answer.text
        == whole_characters(answer.token_ids)
        == "".join(event.text for event in events if isinstance(event, TokensGenerated))
    )
    assert any(len(character.encode()) > 1 for character in answer.text)
    assert answer.usage.num_output_tokens == 120
    assert (backend.num_requests, source.num_streams, pipeline.num_queries) == (0, 0, 0)


async def test_prompts_keep_earlier_passages_with_their_numbers_and_are_prefilled_before_they_are_used() -> None:
    source, backend = GrowingSource(), HashingBackend()
    async with Pipeline(source, backend) as pipeline:
        events, answer = await ask(pipeline, often(max_retrievals=2))
    first, second, third = (bytes(prompt.token_ids).decode(errors="replace") for prompt, _ in backend.answering)
    passages, question = first.split(f"Question: {QUESTION}")
    assert second.startswith(passages + "[2]")
    assert f"Question: {QUESTION}{question}" in second
    assert third.startswith(second.split("Question:")[0] + "[3]")
    assert [citation.uri for citation in answer.citations] == ["0.md", "1.md", "2.md"]
    assert [citation.number for citation in answer.citations] == [1, 2, 3]
    assert [segment.num_passages for segment in answer.segments] == [1, 2, 3]
    prefilled = [prompt.token_ids for prompt, params in backend.requests if prompt.request_class == "stream"]
    assert [bytes(each).decode() for each in prefilled] == [text.split("Question:")[0] for text in (second, third)]
    refreshed = of_kind(events, ContextRefreshed)
    for event, segment, (prompt, _), shared in zip(
        refreshed, answer.segments[1:], backend.answering[1:], (first, second), strict=True
    ):
        assert isinstance(event, ContextRefreshed)
        assert (event.query, event.num_answer_tokens) == (segment.query, segment.first_token)
        assert [chunk.uri for chunk in event.chunks] == [f"{segment.num_passages - 1}.md"]
        num_shared = len(shared.split("Question:")[0].encode())
        assert event.num_recomputed == len(prompt.token_ids) - num_shared
    assert answer.num_prompt_tokens == len(backend.answering[-1][0].token_ids) - answer.segments[-1].first_token


async def test_the_query_is_the_latest_text_or_what_a_function_makes_of_it() -> None:
    source = GrowingSource()
    async with Pipeline(source, HashingBackend()) as pipeline:
        _, answer = await ask(pipeline, often(every_tokens=8, max_retrievals=1))
        assert source.queries[0] == QUESTION
        assert source.queries[1] == answer.segments[1].query
        assert source.queries[1] in answer.text
        told = list[tuple[str, str]]()

        def make_query(question: str, text: str) -> str | None:
            told.append((question, text))
            return None if len(told) < 3 else "anything"

        _, answer = await ask(pipeline, often(every_tokens=8, max_retrievals=1, make_query=make_query))
        assert [question for question, _ in told] == [QUESTION] * 3
        assert all(answer.text.startswith(text) for _, text in told)
        assert source.queries[-1] == "anything"
        with pytest.raises(ConfigurationError, match="the result of make_query"):
            await ask(pipeline, Refresh(every_tokens=8, make_query=lambda question, text: 5))  # type: ignore[arg-type,return-value]
    assert latest_text("?", " \n") is None
    assert latest_text("?", "ab " * 200) == ("ab " * 100).strip()
    assert latest_text("?", "a" * 400) == "a" * 300


class ClockedBackend(HashingBackend):
    """Each token takes `token_s` on a clock of its own."""

    token_s, now_s = 0.02, 0.0

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            self.now_s += self.token_s
            yield event


@pytest.mark.parametrize(("retrieval_s", "lead"), [(0.0, 0), (0.19, 10), (2.0, 20)])
async def test_a_retrieval_begins_as_many_tokens_early_as_it_takes_at_most_half_the_stride(
    retrieval_s: float, lead: int
) -> None:
    texts: list[str] = []

    def make_query(question: str, text: str) -> str:
        texts.append(text)
        return text

    refresh = often(every_tokens=40, max_retrievals=1, make_query=make_query)
    refresh.retrieval.observe(1, retrieval_s)
    backend = ClockedBackend(pause_s=0)
    async with Pipeline(GrowingSource(), backend, clock=lambda: backend.now_s) as pipeline:
        await ask(pipeline, refresh)
    assert 0 <= 40 - lead - len(texts[0].encode()) <= 3, "but for an incomplete character"


async def test_the_time_in_which_a_question_is_typed_does_not_count_as_retrieval() -> None:
    texts: list[str] = []

    def make_query(question: str, text: str) -> str:
        texts.append(text)
        return text

    backend = ClockedBackend(pause_s=0)
    options = {"refresh": often(every_tokens=40, make_query=make_query), "params": SamplingParams(max_tokens=60)}
    async with (
        Pipeline(GrowingSource(), backend, clock=lambda: backend.now_s) as pipeline,
        pipeline.listen(**options) as question,  # type: ignore[arg-type]
    ):
        await question.partial(QUESTION, is_final=True)
        await anyio.sleep(0.1)
        assert question.text_ahead == QUESTION
        backend.now_s += 60.0
        _ = [chunk async for chunk in question.commit(QUESTION)]
    assert len(texts[0].encode()) >= 37, "40 but for an incomplete character"


async def test_new_context_that_costs_more_than_the_rest_of_the_answer_is_not_used() -> None:
    source, backend = GrowingSource(), HashingBackend()
    refresh = often(max_retrievals=1, max_cost=1.0)
    refresh.prefill.observe(1, 60.0)
    async with Pipeline(source, backend) as pipeline:
        events, answer = await ask(pipeline, refresh)
        (skipped,) = of_kind(events, RefreshSkipped)
        assert isinstance(skipped, RefreshSkipped)
        assert "and the rest of the answer perhaps" in skipped.reason
        assert len(backend.requests) == 1
        assert len(answer.segments) == 1
        _, plain = await ask(pipeline, None)
    assert plain.segments == ()


async def test_new_context_is_used_while_the_speed_of_the_answer_is_unknown() -> None:
    refresh = Refresh(every_tokens=1, max_retrievals=1)
    refresh.prefill.observe(1, 1e-9)
    async with Pipeline(GrowingSource(retrieval_s=0), HashingBackend(most=5, pause_s=0.05)) as pipeline:
        events, answer = await ask(pipeline, refresh, max_tokens=20)
    assert of_kind(events, RefreshSkipped) == []
    assert len(answer.segments) == 2


class LaterSource:
    """The second retrieval yields `later`; without any, it never ends."""

    def __init__(self, *later: Chunk) -> None:
        self.queries: list[str] = []
        self._later = later

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        self.queries.append(query)
        if len(self.queries) == 1:
            yield Append(Chunk("Seite", "0.md"))
            return
        for chunk in self._later:
            yield Append(chunk)
        if not self._later:
            await anyio.sleep_forever()


@pytest.mark.parametrize(("max_passages", "uris"), [(1, ["0.md", "a.md"]), (3, ["0.md", "a.md", "b.md"])])
async def test_passages_that_are_found_twice_keep_their_first_place(max_passages: int, uris: list[str]) -> None:
    first = Chunk("Anfang", "a.md", score=0.2)
    source = LaterSource(first, Chunk("Ende", "b.md"), replace(first, score=0.1))
    async with Pipeline(source, HashingBackend()) as pipeline:
        _, answer = await ask(pipeline, often(max_retrievals=1, max_passages=max_passages))
    assert [chunk.uri for chunk in answer.citations] == uris
    assert answer.citations[1].score == first.score


async def test_a_retrieval_that_takes_longer_than_the_answer_lets_the_next_one_begin_earlier() -> None:
    refresh = often(max_retrievals=1)
    async with Pipeline(LaterSource(), HashingBackend()) as pipeline:
        await ask(pipeline, refresh)
    assert refresh.retrieval.seconds(1) > 0


async def test_failed_retrievals_do_not_count_as_quick_ones() -> None:
    refresh = often(max_retrievals=1)
    async with Pipeline(GrowingSource(error=OSError("no route")), HashingBackend()) as pipeline:
        await ask(pipeline, refresh)
    assert refresh.retrieval.seconds(1) == 0


async def test_known_or_too_large_passages_do_not_refresh_the_answer() -> None:
    same = ScriptedSource([Append(Chunk("Seite", "0.md"))])
    async with Pipeline(same, HashingBackend()) as pipeline:
        events, answer = await ask(pipeline, often(max_retrievals=2))
    assert [event.reason for event in events if isinstance(event, RefreshSkipped)] == ["nothing new was found"] * 2
    long = Chunk("\n\n".join(f"Wort {number}" * 20 for number in range(11)), "long.md")
    async with Pipeline(ScriptedSource([Append(long)]), HashingBackend()) as pipeline:
        events, answer = await ask(pipeline, often(max_retrievals=1), max_context_tokens=3_000)
    assert [chunk.uri for chunk in answer.citations] == ["long.md"] * 2, "more than a third of the budget"
    assert [event.reason for event in events if isinstance(event, RefreshSkipped)] == ["nothing new was found"]
    async with Pipeline(GrowingSource(), HashingBackend()) as pipeline:
        events, answer = await ask(pipeline, often(max_retrievals=1), max_context_tokens=50)
    (skipped,) = of_kind(events, RefreshSkipped)
    assert isinstance(skipped, RefreshSkipped)
    assert "max_context_tokens=50" in skipped.reason
    assert len(answer.segments) == len(answer.citations) == 1


async def test_passages_that_do_not_fit_beside_others_are_left_out_and_the_model_s_length_holds() -> None:
    source, backend = GrowingSource(num_chars=900), HashingBackend()
    async with Pipeline(source, backend) as pipeline:
        _, answer = await ask(pipeline, often(), max_tokens=200, reserve_fraction=0)
    assert answer.segments[-1].num_passages == len(answer.citations) > 1
    assert all(len(prompt.token_ids) + params.max_tokens <= 4_000 for prompt, params in backend.answering)


async def test_a_retrieval_or_prefill_that_fails_is_told_and_the_answer_goes_on() -> None:
    error = SourceError("the index is away")
    for source_error, backend_error, reason in (
        (error, None, "SourceError: the index is away"),
        (ValueError("no"), None, "ValueError: no"),
        (asyncio.CancelledError(), None, "although the query was not stopped"),
        (None, BackendError("full"), "BackendError: full"),
    ):
        source, backend = GrowingSource(error=source_error), HashingBackend()
        backend.error = backend_error
        async with Pipeline(source, backend) as pipeline:
            events, answer = await ask(pipeline, often(max_retrievals=1))
        (skipped,) = of_kind(events, RefreshSkipped)
        assert isinstance(skipped, RefreshSkipped)
        assert reason in skipped.reason
        assert (len(answer.token_ids), answer.source_error, source.num_streams) == (60, None, 0)


async def test_an_answer_without_context_gets_passages_in_place_of_the_note_and_a_failure_stays_told() -> None:
    class LateSource(GrowingSource):
        async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            async for event in super().stream(query):
                if query == QUESTION:
                    raise SourceError("away")
                yield event

    for on_error, source in (
        ("raise", ScriptedSource(lambda q: [] if q == QUESTION else [Append(Chunk("Da", "0.md"))])),
        ("answer", LateSource()),
    ):
        backend = HashingBackend()
        async with Pipeline(source, backend, on_source_error=on_error) as pipeline:  # type: ignore[arg-type]
            _, answer = await ask(pipeline, often(max_retrievals=1))
        first, second = (bytes(prompt.token_ids).decode(errors="replace") for prompt, _ in backend.answering)
        assert len(answer.citations) >= 1
        assert "no documents were found" not in second
        assert ("cut short" in first) == ("cut short" in second) == (on_error == "answer")


async def test_min_tokens_and_the_answer_s_end_count_over_all_segments() -> None:
    backend = HashingBackend()
    async with Pipeline(GrowingSource(), backend) as pipeline:
        params = SamplingParams(max_tokens=60, extra={"min_tokens": 20, "logprobs": 1})
        _, answer = await ask(pipeline, often(every_tokens=12, max_retrievals=3), params=params)
    for segment, (_, params) in zip(answer.segments, backend.answering, strict=True):
        assert params.extra == {"min_tokens": max(20 - segment.first_token, 0), "logprobs": 1}
    assert len(answer.segments) > 2


class LateEnd(HashingBackend):
    """Says in a chunk of its own that the answer has ended, as servers do."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            if isinstance(event, AnswerChunk) and event.finish_reason is not None:
                yield replace(event, finish_reason=None)
                await asyncio.sleep(0.05)
                event = AnswerChunk("", (), event.finish_reason)
            yield event


async def test_an_answer_of_max_tokens_is_not_continued_though_its_end_is_not_said_yet() -> None:
    for max_tokens in range(2, 12):
        async with Pipeline(GrowingSource(retrieval_s=0), LateEnd(pause_s=0.02)) as pipeline:
            _, answer = await ask(pipeline, often(every_tokens=2, max_retrievals=9), max_tokens=max_tokens)
        assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"answer_ahead": True}, "answer_ahead"),
        ({"draft": "Da"}, "draft"),
        ({"params": SamplingParams(n=2)}, "n above 1"),
        ({"params": SamplingParams(stop=("x",))}, "stop"),
        ({"params": SamplingParams(json_schema={"type": "object"})}, "json_schema"),
        ({"params": SamplingParams(extra={"structured_outputs": {"regex": "a"}})}, "structured_outputs"),
        ({"params": SamplingParams(extra={"prompt_logprobs": 1})}, "log-probabilities of the prompt"),
    ],
)
async def test_options_that_concern_the_whole_answer_are_refused(options: dict[str, object], name: str) -> None:
    async with Pipeline(GrowingSource(), HashingBackend()) as pipeline:
        with pytest.raises(ConfigurationError, match=f"refresh= does not work with {name}: switch that off"):
            pipeline.stream(QUESTION, refresh=Refresh(), **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="refresh"):
            pipeline.stream(QUESTION, refresh=True)  # type: ignore[arg-type]
    wrong = {"every_tokens": 0, "max_cost": 0, "max_passages": 1.5, "max_retrievals": 0, "make_query": 5}
    for option, value in wrong.items():
        with pytest.raises(ConfigurationError, match=option):
            Refresh(**{option: value})  # type: ignore[arg-type]


async def test_a_server_that_takes_only_text_is_refused_before_it_is_asked() -> None:
    source, backend = GrowingSource(), HashingBackend()
    backend.model = replace(backend.model, is_exact=False)
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(ConfigurationError, match="HashingBackend does not: use VllmBackend"):
            await ask(pipeline, Refresh())
    assert (source.queries, backend.requests) == ([], [])


async def test_a_retrieval_that_still_runs_when_the_answer_ends_or_the_deadline_passes_is_stopped() -> None:
    source, backend = GrowingSource(retrieval_s=0.0), HashingBackend()
    async with Pipeline(source, backend) as pipeline:
        source._retrieval_s = 0.0
        stream = pipeline.stream(QUESTION, refresh=often(every_tokens=8), params=SamplingParams(max_tokens=40))
        async for _ in stream:
            source._retrieval_s = 60.0
        assert len(stream.result.token_ids) == 40
        assert (len(source.queries), source.num_streams) == (2, 0)
        source._retrieval_s = 0.0
        with pytest.raises(DeadlineExceededError, match="while generating"):
            await ask(pipeline, often(), max_tokens=2_000, deadline_s=1)
    assert (backend.num_requests, source.num_streams) == (0, 0)


async def test_stopping_at_any_place_frees_everything() -> None:
    tasks = asyncio.all_tasks()
    for num_events in range(1, 30):
        source, backend = GrowingSource(), HashingBackend(pause_s=0)
        async with Pipeline(source, backend) as pipeline:
            async with pipeline.events(
                QUESTION, refresh=Refresh(every_tokens=2), params=SamplingParams(max_tokens=60)
            ) as stream:
                for _ in range(num_events):
                    await anext(stream)
            assert (backend.num_requests, source.num_streams, pipeline.num_queries) == (0, 0, 0), num_events
    for num_steps in range(0, 120, 3):
        source, backend = GrowingSource(retrieval_s=0), HashingBackend(pause_s=0)
        async with Pipeline(source, backend) as pipeline:
            asking = asyncio.create_task(ask(pipeline, Refresh(every_tokens=2)))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            if not asking.cancel():  # the answer has ended: in how many steps differs from run to run
                await asking
                break
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert (backend.num_requests, source.num_streams, pipeline.num_queries) == (0, 0, 0), num_steps
    assert asyncio.all_tasks() == tasks


async def test_a_question_that_is_still_being_asked_may_have_it_too() -> None:
    source, backend = GrowingSource(), HashingBackend()
    params = SamplingParams(max_tokens=60)
    async with (
        Pipeline(source, backend) as pipeline,
        pipeline.listen(refresh=often(every_tokens=8), params=params) as question,
    ):
        await question.partial(QUESTION, is_final=True)
        await anyio.sleep(0.05)
        answer = question.commit(QUESTION)
        assert "".join([chunk.text async for chunk in answer]) == answer.result.text
    assert len(answer.result.segments) > 1
    assert source.num_streams == backend.num_requests == 0
