"""A query in one of several replicas: what is sent there, and what becomes of it when that is lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest
from in_process import Fewest, InProcess, after, answer, growing, replica_streams

from streamrag import Append, Chunk, Pipeline
from streamrag.backends.replicas.replica_chooser import ReplicaCandidate
from streamrag.backends.replicas.replica_streams import ReplicaStreams
from streamrag.backends.replicas.wire import Opened
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, EngineDeadError, PromptTooLongError, SourceError
from streamrag.telemetry import Answer
from streamrag.testing import ScriptedBackend, ScriptedSource


async def settled() -> None:
    """Let everything that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


def all_tasks() -> list[asyncio.Task[object]]:
    """But this test's."""
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_query_is_routed_once_and_all_its_prompts_go_there() -> None:
    a, b = ScriptedBackend(), ScriptedBackend()
    replicas, router = InProcess({"a": a, "b": b}), Fewest()
    streams = replica_streams(replicas, router)
    second, third = asyncio.Event(), asyncio.Event()
    prompts = growing("It jam", "It jams", "It hums")
    asking = asyncio.create_task(answer(streams, after(prompts, second, third)))
    await settled()
    second.set()
    await settled()
    third.set()
    assert await asking == "An answer."
    assert [[(p.token_ids, p.num_shared) for p in query] for query in a.prompts] == [
        [(p.token_ids, p.num_shared) for p in prompts]
    ]
    assert b.prompts == []
    assert router.computed == [(prompts[-1].token_ids, "a")]
    assert [await answer(streams, after(growing("Why?"))) for _ in range(2)] == ["An answer."] * 2
    assert replicas.replicas["a"].num_open == 0
    assert (streams.counts.num_asked, streams.counts.num_answered) == (3, 3)


async def test_queries_that_wait_count_so_that_the_next_goes_elsewhere() -> None:
    hold = anyio.Event()
    a, b = ScriptedBackend(hold=hold), ScriptedBackend(hold=hold)
    streams = replica_streams(InProcess({"a": a, "b": b}))
    asking = [asyncio.create_task(answer(streams, after(growing("Why?")))) for _ in range(4)]
    await settled()
    assert (a.num_requests, b.num_requests) == (2, 2)
    hold.set()
    assert await asyncio.gather(*asking) == ["An answer."] * 4


async def test_a_query_that_has_shown_nothing_is_replayed_from_its_newest_prompt() -> None:
    a, b = ScriptedBackend(hold=anyio.Event()), ScriptedBackend()
    replicas, router = InProcess({"a": a, "b": b}), Fewest()
    streams = replica_streams(replicas, router)
    second, third = asyncio.Event(), asyncio.Event()
    prompts = growing("It", "It jams", "It jams.")
    asking = asyncio.create_task(answer(streams, after(prompts, second, third)))
    await settled()
    second.set()
    await settled()
    replicas.kill("a")
    await settled()
    third.set()
    assert await asking == "An answer."
    assert [(p.token_ids, p.num_shared) for p in b.prompts[0]] == [(prompts[1].token_ids, 0), (prompts[2].token_ids, 7)]
    assert router.gone == ["a"]
    assert (streams.counts.num_replayed, streams.counts.num_lost) == (1, 0)
    assert a.num_requests == 0


async def test_a_query_whose_engine_died_is_replayed_and_nothing_goes_to_that_replica_any_more() -> None:
    class Dying(ScriptedBackend):
        async def generate(self, prompts, params):  # type: ignore[no-untyped-def, override]
            raise EngineDeadError("out of memory")
            yield

    dying, b = Dying(), ScriptedBackend()
    replicas = InProcess({"a": dying, "b": b})
    streams = replica_streams(replicas)
    assert [await answer(streams, after(growing("Why?"))) for _ in range(3)] == ["An answer."] * 3
    assert streams.counts.num_replayed == 1
    with pytest.raises(EngineDeadError, match="out of memory"):
        replicas.replicas["a"].check_health()
    replicas.replicas["b"].check_health()


async def test_a_stream_that_a_replica_ends_by_itself_is_replayed_or_is_an_error() -> None:
    """As it does where the caller was not heard of for too long: a laptop that slept, say."""
    a = ScriptedBackend(hold=anyio.Event())
    replicas = InProcess({"a": a})
    streams = replica_streams(replicas)
    asking = asyncio.create_task(answer(streams, after(growing("Why?"))))
    await settled()
    for stream in replicas.replicas["a"]._streams.values():
        stream.abandon()
    a._hold = None
    assert await asking == "An answer."
    assert (streams.counts.num_replayed, a.num_requests) == (1, 0)

    replicas = InProcess({"a": ScriptedBackend(is_endless=True)})
    streams = replica_streams(replicas)
    asking = asyncio.create_task(answer(streams, after(growing("Why?"))))
    await settled()
    for stream in replicas.replicas["a"]._streams.values():
        stream.abandon()
    with pytest.raises(BackendError, match=r"were shown: ask again \(its stream ended without the end of an answer"):
        await asking


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([(AnswerChunk("a", (1,)),)], "an AnswerChunk"),
        ([(Prefilled(3),)], "a Prefilled"),
        ([(Opened("a"),), (Opened("b"),)], "an Opened"),
        ([(Opened("a"),), ("An answer.",)], "a str"),
        ([(Opened("a"),), 42], "an int"),
        ([None], "lost, one after another"),
    ],
)
async def test_a_message_that_no_replica_sends_ends_the_query(sent: list[object], said: str) -> None:
    replicas, router = InProcess({"a": ScriptedBackend()}), Fewest()
    is_closed = []

    async def garbled(call):  # type: ignore[no-untyped-def]
        call.ticket.rank([ReplicaCandidate("a", 8, {})])
        try:
            for batch in sent:
                yield batch
        finally:
            is_closed.append(True)

    replicas.open = garbled  # type: ignore[method-assign]
    streams = replica_streams(replicas, router)
    with pytest.raises(BackendError, match=said):
        await answer(streams, after(growing("Why", "Why?"), asyncio.Event()))
    assert len(is_closed) == 1 + streams.counts.num_replayed
    assert streams.chooser.in_use() == set()
    assert all_tasks() == []


async def test_a_query_that_has_shown_tokens_ends_with_an_error_that_says_so() -> None:
    replicas = InProcess({"a": ScriptedBackend(error=EngineDeadError("out of memory"))})
    streams = replica_streams(replicas)
    with pytest.raises(BackendError, match=r"lost after 1 tokens of the answer were shown: ask again \(out of memory"):
        await answer(streams, after(growing("Why?")))
    assert (streams.counts.num_lost, streams.counts.num_replayed) == (1, 0)


async def test_replays_are_bounded() -> None:
    replicas = InProcess({name: ScriptedBackend(hold=anyio.Event()) for name in "abcd"})
    streams = replica_streams(replicas, max_replays=2)
    asking = asyncio.create_task(answer(streams, after(growing("Why?"))))
    for name in "abc":
        await settled()
        replicas.kill(name)
    with pytest.raises(BackendError, match="3 replicas were lost, one after another: c was killed"):
        await asking
    assert replicas.replicas["d"].num_open == 0


async def test_errors_of_engines_arrive_as_what_they_are() -> None:
    streams = replica_streams(InProcess({"a": ScriptedBackend(error=PromptTooLongError("9 tokens do not fit"))}))
    with pytest.raises(PromptTooLongError, match="9 tokens do not fit"):
        await answer(streams, after(growing("Why?")))


async def test_an_error_of_the_source_ends_a_held_or_queued_stream_at_once() -> None:
    a = ScriptedBackend(hold=anyio.Event())
    streams = replica_streams(InProcess({"a": a}, max_open=1))

    async def broken(go: asyncio.Event) -> object:
        yield growing("Why", "Why?")[0]
        await go.wait()
        raise SourceError("the shelf is empty")

    held, queued = asyncio.Event(), asyncio.Event()
    holds = asyncio.create_task(answer(streams, broken(held)))  # type: ignore[arg-type]
    await settled()
    waits = asyncio.create_task(answer(streams, broken(queued)))  # type: ignore[arg-type]
    await settled()
    for asking, event in ((waits, queued), (holds, held)):
        event.set()
        with pytest.raises(SourceError, match="the shelf is empty"):
            await asking
    assert a.num_requests == 0


async def test_prompts_that_end_without_a_complete_one_are_an_error() -> None:
    streams = replica_streams(InProcess({"a": ScriptedBackend()}))
    with pytest.raises(BackendError, match="without a complete one"):
        await answer(streams, after(growing("Why", "Why?")[:1]))


async def test_a_query_waits_where_every_replica_is_full() -> None:
    hold = anyio.Event()
    a = ScriptedBackend(hold=hold)
    replicas = InProcess({"a": a}, max_open=1)
    streams = replica_streams(replicas)
    asking = [asyncio.create_task(answer(streams, after(growing("Why?")))) for _ in range(3)]
    await settled()
    assert replicas.replicas["a"].num_open == 1
    hold.set()
    assert await asyncio.gather(*asking) == ["An answer."] * 3
    assert streams.counts.num_replayed == 0


@pytest.mark.parametrize("stage", ["opened", "prefilled", "answering", "refused"])
async def test_walking_away_leaves_nothing_behind(stage: str) -> None:
    hold = anyio.Event()
    a = ScriptedBackend(hold=hold if stage in ("opened", "refused") else None, is_endless=True)
    replicas = InProcess({"a": a}, max_open=0 if stage == "refused" else 1)
    streams = replica_streams(replicas)
    seen: list[BackendEvent] = []
    prompts = growing("Why", "Why?")
    waits = asyncio.Event()
    given = after(prompts, waits) if stage != "answering" else after(prompts)
    asking = asyncio.create_task(answer(streams, given, seen))
    await settled()
    assert (len(seen) > 1) == (stage == "answering")
    assert any(isinstance(event, Prefilled) for event in seen) == (stage in ("prefilled", "answering"))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert replicas.replicas["a"].num_open == a.num_requests == 0
    assert all_tasks() == []


async def test_cancelling_a_replayed_query_at_any_step_leaves_nothing_behind() -> None:
    """Cancelled after one step of the loop, after two, and so on, until the answer is there."""
    num_steps, is_answered = 0, False
    while not is_answered:
        engines = {name: ScriptedBackend(hold=None if name == "b" else anyio.Event()) for name in "ab"}
        replicas, second = InProcess(dict(engines)), asyncio.Event()
        streams = replica_streams(replicas)
        asking = asyncio.create_task(answer(streams, after(growing("Why", "Why?"), second)))
        await settled()
        second.set()
        replicas.kill("a")
        for _ in range(num_steps):
            await asyncio.sleep(0)
        asking.cancel()
        (told,) = await asyncio.gather(asking, return_exceptions=True)
        is_answered = told == "An answer."
        assert is_answered or isinstance(told, asyncio.CancelledError)
        assert sum(engine.num_requests for engine in engines.values()) == replicas.replicas["b"].num_open == 0
        assert streams.chooser.in_use() == set()
        assert streams.chooser._tracker._queries == {}
        assert all_tasks() == []
        num_steps += 1
    assert num_steps > 20


async def test_prompts_that_come_while_one_is_on_its_way_are_joined() -> None:
    a = ScriptedBackend()
    replicas = InProcess({"a": a})
    streams = replica_streams(replicas)
    send = replicas.update
    go = asyncio.Event()
    sent: list[int] = []

    async def slow(replica_id, stream_id, delta):  # type: ignore[no-untyped-def]
        sent.append(delta.number)
        await go.wait()
        return await send(replica_id, stream_id, delta)

    replicas.update = slow  # type: ignore[method-assign]
    second, third = asyncio.Event(), asyncio.Event()
    prompts = growing("a", "ab", "abc", "abd", "abde")
    asking = asyncio.create_task(answer(streams, after(prompts, second, third)))
    await settled()
    second.set()
    await settled()
    third.set()
    await settled()
    assert sent == [2]
    go.set()
    assert await asking == "An answer."
    assert sent == [2, 5]
    assert a.prompts[0] == [prompts[0], Prompt(prompts[-1].token_ids, 1, is_complete=True)]


async def test_replicas_in_use_are_told_that_their_caller_lives() -> None:
    replicas = InProcess({name: ScriptedBackend(hold=anyio.Event()) for name in "abc"})
    streams = replica_streams(replicas)
    asking = [asyncio.create_task(answer(streams, after(growing("Why?")))) for _ in range(2)]
    await settled()
    heard: list[str] = []
    for name, replica in replicas.replicas.items():
        replica.record_heartbeat = lambda caller_id, name=name: heard.append(name)  # type: ignore[method-assign, misc]
    await streams.send_heartbeats()
    assert sorted(heard) == ["a", "b"]
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await streams.send_heartbeats()
    assert sorted(heard) == ["a", "b"]


async def test_a_replica_that_hangs_does_not_keep_others_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.backends.replicas.replica_streams.HEARTBEAT_S", 0.01)
    replicas = InProcess({name: ScriptedBackend(hold=anyio.Event()) for name in "ab"})
    streams = replica_streams(replicas)
    asking = [asyncio.create_task(answer(streams, after(growing("Why?")))) for _ in range(2)]
    await settled()
    heard: list[str] = []

    async def send_heartbeat(replica_id: str, caller_id: str) -> None:
        if replica_id == "a":
            await asyncio.Event().wait()
        heard.append(replica_id)

    replicas.send_heartbeat = send_heartbeat  # type: ignore[method-assign]
    await streams.send_heartbeats()
    await streams.send_heartbeats()
    assert heard == ["b", "b"]
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


class Drafting(ScriptedBackend):
    """Verifies drafts; a draft never gets further than "An"."""

    def __init__(self) -> None:
        super().__init__()
        self.model = replace(self.model, verifies_drafts=True)

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        mine, text = len(self.prompts), ""
        async for event in super().generate(prompts, params):
            yield event
            text += event.text if isinstance(event, AnswerChunk) else ""
            if text == "An" and self.prompts[mine][0].request_class == "draft":
                await anyio.sleep_forever()

    @property
    def drafts(self) -> list[Prompt]:
        return [prompts[0] for prompts in self.prompts if prompts and prompts[0].request_class == "draft"]


class InReplicas:
    """Replicas, as a backend of pipelines."""

    def __init__(self, streams: ReplicaStreams, model: ModelInfo) -> None:
        self.model = model
        self.generate = streams.generate


async def drafted(streams: ReplicaStreams, model: ModelInfo, source: ScriptedSource) -> Answer:
    async with Pipeline(source, InReplicas(streams, model), overlap=True, answer_ahead=True) as pipeline:
        stream = pipeline.stream("Why?")
        assert [chunk async for chunk in stream]
        return stream.result


def chunk(text: str) -> Append:
    return Append(Chunk(text, f"{text}.md"))


async def test_a_draft_goes_to_the_replica_of_its_query_is_not_counted_and_comes_with_the_complete_prompt() -> None:
    a, b = Drafting(), Drafting()
    replicas, router = InProcess({"a": a, "b": b}, max_open=1), Fewest()
    streams, steps = replica_streams(replicas, router), [chunk("damp"), 0.05, chunk("dust"), 0.05]
    answers = await asyncio.gather(*(drafted(streams, a.model, ScriptedSource(steps)) for _ in range(2)))
    assert [answer.text for answer in answers] == ["An answer."] * 2
    for backend in (a, b):
        (complete,) = [p for ps in backend.prompts for p in ps if p.is_complete and p.request_class == "pool"]
        assert [len(draft.draft) for draft in backend.drafts] == [0, 2]
        assert complete.draft == tuple(map(ord, "An"))
        assert backend.drafts[-1].token_ids == complete.token_ids
        assert backend.num_requests == 0
    assert (streams.counts.num_asked, streams.counts.num_answered) == (2, 2)
    assert len(router.computed) == 2, "the router hears of queries only"
    assert all(each.stats()["queued_tokens"] == each.num_open == 0 for each in replicas.replicas.values())


async def test_a_query_whose_replica_is_lost_while_it_is_drafted_is_replayed() -> None:
    a, b = Drafting(), Drafting()
    replicas, more = InProcess({"a": a, "b": b}), anyio.Event()
    streams = replica_streams(replicas)
    asking = asyncio.create_task(drafted(streams, a.model, ScriptedSource([chunk("damp"), more, chunk("dust"), 0.05])))
    while not a.drafts:
        await settled()
    replicas.kill("a")
    await settled()
    more.set()
    assert (await asking).text == "An answer."
    assert (streams.counts.num_replayed, streams.counts.num_lost) == (1, 0)
    assert a.num_requests == b.num_requests == 0
    assert streams.chooser.in_use() == set()
