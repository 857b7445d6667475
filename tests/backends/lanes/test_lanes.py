"""Lanes without engines: who waits, what is computed again, and what ends with an error."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes import backend as lanes_module
from streamrag.backends.lanes.kv_transfer import MAX_KV_AGE_S, KvTransfer
from streamrag.backends.lanes.lane_choice import ReservedBlocks
from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client.lane_engine import MAX_READ_S, READ_BY_KEY, LaneFacts
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, SourceError
from streamrag.serve.config.factories import make_backend
from streamrag.serve.config.layers import load
from streamrag.support.clock import monotonic, seconds_since_boot


class FakeStream:
    def __init__(self, lane: "FakeLane") -> None:
        self.token_ids: tuple[int, ...] = ()
        self.is_complete = False
        self.kv_transfer: dict[str, Any] = {}
        self.record: Any = None
        self._lane = lane
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def update(self, prompt: Prompt) -> None:
        self._lane.prompts.append((prompt.token_ids, prompt.is_complete))
        self.token_ids, self.is_complete = prompt.token_ids, prompt.is_complete
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncGenerator[Prefilled | AnswerChunk, None]:
        while not self.is_complete:
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            self._lane.check_health()
            yield Prefilled(len(self.token_ids) - 1)
        self.kv_transfer = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]]}
        self.record = SimpleNamespace(finished_s=monotonic())
        yield AnswerChunk("", (9,), "length")


class FakeLane:
    """An engine that answers with the tokens 1, 2 and 3, and dies when told."""

    def __init__(
        self, lane: str, *, dies_before: int | None = None, num_blocks: int = 1_000, max_num_seqs: int = 100
    ) -> None:
        self.lane = lane
        self.prompts: list[tuple[tuple[int, ...], bool]] = []
        self.params: list[SamplingParams] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.goes_on_after_first = asyncio.Event()
        self.goes_on_after_first.set()
        self.is_dead = self.is_closed = False
        self.model = "the model"
        common = {"dtype": "float32", "block_size": "2"}
        self.lane_facts = LaneFacts(common, block_size=2, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.hangs_when_it_reads_kv = False
        self.num_health_checks = 0
        self._dies_before = dies_before

    async def start(self, progress: Any) -> None: ...
    async def aclose(self) -> None:
        self.is_closed = True

    def check_params(self, params: SamplingParams) -> None: ...

    def check_health(self) -> None:
        self.num_health_checks += 1
        if self.is_dead:
            raise EngineDeadError("it was killed")

    @property
    def streams(self) -> Any:
        return self

    @asynccontextmanager
    async def open(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[FakeStream]:
        self.check_health()
        self.params.append(params)
        stream = FakeStream(self)
        await stream.update(prompt)
        yield stream

    async def generate(self, prompts: Any, params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        self.check_health()
        self.params.append(params)
        self.prompts += [(prompt.token_ids, prompt.is_complete) async for prompt in prompts]
        if self.hangs_when_it_reads_kv and params.extra:
            await asyncio.Event().wait()
        await self.goes_on.wait()
        for number in (1, 2, 3):
            if number == self._dies_before:
                self.is_dead = True
            self.check_health()
            if number > 1:
                await self.goes_on_after_first.wait()
            yield AnswerChunk(str(number), (number,), "length" if number == 3 else None)


async def start_lanes(prefill: list[FakeLane], decode: list[FakeLane], **options: Any) -> DisaggregatedBackend:
    backend = DisaggregatedBackend(prefill, decode, router="round_robin", **options)
    await backend.start(lambda line: None)
    return backend


async def growing(*prompts: tuple[int, ...]) -> AsyncIterator[Prompt]:
    for number, prompt in enumerate(prompts, start=1):
        yield Prompt(prompt, 0, is_complete=number == len(prompts))
        await asyncio.sleep(0)


async def answer(
    backend: DisaggregatedBackend, *prompts: tuple[int, ...], params: SamplingParams | None = None
) -> list[str]:
    async with aclosing(backend.generate(growing(*prompts), params or SamplingParams())) as events:
        return [event.text async for event in events if isinstance(event, AnswerChunk)]


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_prompt_goes_to_a_prefill_lane_and_its_kv_to_a_decode_lane() -> None:
    prefill, decode, transfers = FakeLane("prefill"), FakeLane("decode"), []
    backend = await start_lanes([prefill], [decode])
    backend.on_transfer = transfers.append
    assert backend.model == "the model"
    extra = {"extra_args": {"theirs": 1}}
    assert await answer(backend, (5,), (5, 6), params=SamplingParams(top_k=3, extra=extra)) == ["1", "2", "3"]
    assert prefill.prompts[-1] == ((5, 6), True)
    assert prefill.params[0].max_tokens == 1
    assert prefill.params[0].extra == {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
    assert decode.prompts == [((5, 6), True)]
    assert decode.params[0].top_k == 3
    extra_args = dict(decode.params[0].extra["extra_args"])
    kv_transfer = extra_args.pop("kv_transfer_params")
    assert extra_args == {"theirs": 1}
    assert kv_transfer.pop(READ_BY_KEY) == pytest.approx(seconds_since_boot() + MAX_READ_S, abs=MAX_KV_AGE_S)
    assert kv_transfer == {"do_remote_prefill": True, "remote_block_ids": [[3, 4]]}
    (one,) = transfers
    assert isinstance(one, KvTransfer)
    assert (one.prefill_lane, one.decode_lane, one.num_tokens, one.num_blocks) == ("prefill-0", "decode-0", 2, 2)
    await backend.aclose()
    with pytest.raises(BackendError, match="not running"):
        await answer(backend, (5,))


async def test_kv_is_fetched_once_for_several_answers_and_not_for_log_probabilities_of_the_prompt() -> None:
    prefill, decode = FakeLane("prefill"), FakeLane("decode")
    backend = await start_lanes([prefill], [decode])
    await answer(backend, (5,), params=SamplingParams(n=2))
    fetching, answering = decode.params
    assert fetching.max_tokens == 1
    assert "kv_transfer_params" in fetching.extra["extra_args"]
    assert (answering.n, answering.extra) == (2, {})
    num_prefilled = len(prefill.prompts)
    await answer(backend, (5,), (5, 6), params=SamplingParams(extra={"prompt_logprobs": 0}))
    assert len(prefill.prompts) == num_prefilled
    assert decode.prompts[-1] == ((5, 6), True)


async def test_a_query_waits_with_an_open_prompt_until_a_decode_lane_has_room() -> None:
    prefill, decode = FakeLane("prefill"), FakeLane("decode")
    backend = await start_lanes([prefill], [decode], max_open=1)
    decode.goes_on.clear()
    asking = [asyncio.create_task(answer(backend, (number,))) for number in range(3)]
    await settle()
    assert [prompt for prompt in prefill.prompts if prompt[1]] == [((0,), True)]
    assert {prompt for prompt in prefill.prompts if not prompt[1]} == {((1,), False), ((2,), False)}
    asking[1].cancel()
    await settle()
    decode.goes_on.set()
    assert await asking[0] == await asking[2] == ["1", "2", "3"]
    assert [prompt[0] for prompt in decode.prompts] == [(0,), (2,)]
    assert await answer(backend, (7,)) == ["1", "2", "3"]


async def test_a_decode_lane_gets_no_more_queries_than_its_engine_answers_at_a_time() -> None:
    prefill, decode = FakeLane("prefill", max_num_seqs=1), FakeLane("decode", max_num_seqs=2)
    backend = await start_lanes([prefill], [decode])
    decode.goes_on.clear()
    asking = [asyncio.create_task(answer(backend, (number,))) for number in range(4)]
    await settle()
    assert [prompt[0] for prompt in decode.prompts] == [(0,), (1,)]
    assert {prompt for prompt in prefill.prompts if not prompt[1]} == {((2,), False), ((3,), False)}
    decode.goes_on.set()
    assert await asyncio.gather(*asking) == [["1", "2", "3"]] * 4


async def test_a_query_waits_while_its_prompt_does_not_fit_into_the_kv_cache_beside_others() -> None:
    prefill, decode = FakeLane("prefill"), FakeLane("decode", num_blocks=6)
    backend = await start_lanes([prefill], [decode])
    decode.goes_on.clear()
    prompts = [(1, 2, 3, 4, 5), (6, 7, 8, 9), (10, 11), (12,)]  # three blocks, three, two, and one
    asking = [asyncio.create_task(answer(backend, prompt)) for prompt in prompts]
    await settle()
    assert [prompt for prompt, _ in decode.prompts] == prompts[:2]
    assert {prompt for prompt, is_complete in prefill.prompts if not is_complete} == {*prompts[2:]}
    asking[0].cancel()
    await settle()
    assert [prompt for prompt, _ in decode.prompts] == prompts
    decode.goes_on.set()
    for each in asking[1:]:
        assert await each == ["1", "2", "3"]


async def test_a_prompt_larger_than_a_decode_lane_is_answered_alone() -> None:
    decode = FakeLane("decode", num_blocks=3)
    backend = await start_lanes([FakeLane("prefill")], [decode])
    decode.goes_on.clear()
    large, small = tuple(range(100)), (7,)
    asking = [asyncio.create_task(answer(backend, prompt)) for prompt in (large, small)]
    await settle()
    assert [prompt for prompt, _ in decode.prompts] == [large]
    decode.goes_on.set()
    assert await asking[0] == await asking[1] == ["1", "2", "3"]


async def test_prompts_with_the_same_beginning_count_once_when_one_of_them_is_answered() -> None:
    decode = FakeLane("decode", num_blocks=50 + 2)
    backend = await start_lanes([FakeLane("prefill")], [decode])
    decode.goes_on.clear()
    decode.goes_on_after_first.clear()
    data = tuple(range(100))
    asking = [asyncio.create_task(answer(backend, (*data, number))) for number in range(3)]
    await settle()
    assert len(decode.prompts) == 1  # vLLM loads a copy for each query
    decode.goes_on.set()
    await settle()
    assert len(decode.prompts) == 2  # each needs one block of its own
    decode.goes_on_after_first.set()
    await asyncio.gather(*asking)
    assert len(decode.prompts) == 3


def test_blocks_are_shared_only_with_queries_that_answer_already() -> None:
    blocks = ReservedBlocks(8)
    blocks.reserve("a", [1, 2], 1)
    blocks.reserve("b", [1, 2], 1)  # loads a copy of its own
    assert blocks.has_room([7], 1)
    assert not blocks.has_room([1, 2], 1)
    blocks.share("a")
    blocks.share("b")
    assert blocks.has_room([1, 2, 3], 1)
    blocks.reserve("c", [1, 2, 3], 1)
    blocks.release("a")
    blocks.release("b")
    assert blocks.has_room([1, 2, 9], 3)  # "c" holds three blocks, and one for its answer
    assert not blocks.has_room([1, 2, 9], 4)
    blocks.release("c")
    blocks.release("c")
    blocks.reserve("d", [1, 2], 1)
    assert not blocks.has_room([1, 2], 4)


async def test_each_of_several_answers_needs_a_block() -> None:
    decode = FakeLane("decode", num_blocks=4)
    backend = await start_lanes([FakeLane("prefill")], [decode])
    decode.goes_on.clear()
    params = SamplingParams(n=3)
    asking = [asyncio.create_task(answer(backend, (number,), params=params)) for number in range(2)]
    await settle()
    assert [prompt[0] for prompt in decode.prompts] == [(0,)]
    decode.goes_on.set()
    await asyncio.gather(*asking)


async def test_a_query_that_waits_goes_to_a_replica_that_was_added() -> None:
    decode = FakeLane("decode")
    decode.num_replicas = 1  # type: ignore[attr-defined]
    backend = await start_lanes([FakeLane("prefill")], [decode], max_open=1)
    decode.goes_on.clear()
    decode.goes_on_after_first.clear()
    asking = [asyncio.create_task(answer(backend, (number,))) for number in range(2)]
    await settle()
    assert len(decode.prompts) == 1
    decode.num_replicas = 2  # type: ignore[attr-defined]
    decode.goes_on.set()
    await settle()
    assert len(decode.prompts) == 2
    decode.goes_on_after_first.set()
    await asyncio.gather(*asking)


async def test_a_prompt_goes_to_the_decode_lane_that_has_room_for_it() -> None:
    decode = [FakeLane("decode", num_blocks=num_blocks) for num_blocks in (3, 10, 3)]
    backend = await start_lanes([FakeLane("prefill")], decode)
    for lane in decode:
        lane.goes_on.clear()
    prompts = [(number,) * 4 for number in range(5)]
    asking = [asyncio.create_task(answer(backend, prompt)) for prompt in prompts]
    await settle()
    assert [len(lane.prompts) for lane in decode] == [1, 3, 1]
    for lane in decode:
        lane.goes_on.set()
    await asyncio.gather(*asking)


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_a_decode_lane_whose_kv_does_not_come_computes_the_prompt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    monkeypatch.setattr("streamrag.backends.lanes.backend.MAX_FETCH_S", 0.01)
    decode, transfers = FakeLane("decode"), []
    backend = await start_lanes([FakeLane("prefill")], [decode], max_replays=0)
    backend.on_transfer = transfers.append
    decode.hangs_when_it_reads_kv = True
    assert await answer(backend, (5,), params=SamplingParams(n=num_answers)) == ["1", "2", "3"]
    reading, computing = decode.params
    assert "kv_transfer_params" in reading.extra["extra_args"]
    assert (computing.n, computing.extra) == (num_answers, {})
    assert not transfers
    assert [record.message for record in caplog.records] == [
        "no first token 0.01 s after the KV transfer was requested: decode-0 computes the prompt"
    ]
    assert backend._prefill_lanes is not None
    assert backend._decode_lanes is not None
    assert backend._prefill_lanes._chooser.in_use() == backend._decode_lanes._chooser.in_use() == set()


async def test_a_query_that_is_cancelled_while_kv_does_not_come_holds_no_reservation() -> None:
    decode = FakeLane("decode", num_blocks=1)
    backend = await start_lanes([FakeLane("prefill")], [decode])
    decode.hangs_when_it_reads_kv = True
    asking = asyncio.create_task(answer(backend, (5,)))
    await settle()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    decode.hangs_when_it_reads_kv = False
    assert await answer(backend, (6,)) == ["1", "2", "3"]


async def test_a_caller_cannot_say_which_kv_is_read() -> None:
    backend = await start_lanes([FakeLane("prefill")], [FakeLane("decode")])
    extra = {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "elsewhere"}}}
    with pytest.raises(ConfigurationError, match=r"extra_args\['kv_transfer_params'\] is reserved for lanes"):
        await answer(backend, (5,), params=SamplingParams(extra=extra))


async def test_a_query_without_output_is_computed_again_when_a_lane_dies() -> None:
    prefill = [FakeLane("prefill"), FakeLane("prefill")]
    decode = [FakeLane("decode", dies_before=1), FakeLane("decode")]
    backend = await start_lanes(prefill, decode)
    prefill[0].is_dead = True
    assert await answer(backend, (5,), (5, 6)) == ["1", "2", "3"]
    assert [lane.is_dead for lane in decode] == [True, False]
    assert [len([p for p in lane.prompts if p[1]]) for lane in prefill] == [0, 2]
    backend.check_health()


async def test_a_prefill_lane_that_dies_with_an_open_prompt_loses_nothing() -> None:
    prefill = [FakeLane("prefill"), FakeLane("prefill")]
    backend = await start_lanes(prefill, [FakeLane("decode")])
    goes_on = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt((5,), 0, is_complete=False)
        await goes_on.wait()
        yield Prompt((5, 6), 1, is_complete=True)

    events = backend.generate(prompts(), SamplingParams())
    assert await anext(events) == Prefilled(0)
    prefill[0].is_dead = True
    goes_on.set()
    assert [event.text async for event in events if isinstance(event, AnswerChunk)] == ["1", "2", "3"]
    assert prefill[1].prompts[-1] == ((5, 6), True)


async def test_an_answer_that_has_shown_tokens_ends_with_an_error() -> None:
    backend = await start_lanes([FakeLane("prefill")], [FakeLane("decode", dies_before=3), FakeLane("decode")])
    with pytest.raises(BackendError, match="decode-0 was lost: it was killed, after 2 tokens were shown: ask again"):
        await answer(backend, (5,))


async def test_replays_end() -> None:
    decode = [FakeLane("decode", dies_before=1) for _ in range(3)]
    backend = await start_lanes([FakeLane("prefill")], decode, max_replays=1)
    with pytest.raises(BackendError, match=r"2 lanes were lost, one after another: decode-\d was lost"):
        await answer(backend, (5,))
    for lane in decode:
        lane.is_dead = True
    with pytest.raises(BackendError, match="decode-0: it was killed; decode-1: it was killed; decode-2: "):
        await answer(backend, (5,))
    with pytest.raises(EngineDeadError):
        backend.check_health()


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_kv_whose_lease_may_have_ended_is_computed_by_the_decode_lane(
    monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    decode, transfers = FakeLane("decode"), []
    backend = await start_lanes([FakeLane("prefill")], [decode], max_replays=0)
    backend.on_transfer = transfers.append
    monkeypatch.setattr(lanes_module, "MAX_KV_AGE_S", -1.0)
    assert await answer(backend, (5,), params=SamplingParams(n=num_answers)) == ["1", "2", "3"]
    assert [params.extra for params in decode.params] == [{}]
    assert not transfers


async def test_a_reader_that_pauses_holds_no_reservation() -> None:
    prefill, decode = FakeLane("prefill"), FakeLane("decode")
    backend = await start_lanes([prefill], [decode], max_open=1)

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt((4,), 0, is_complete=False)
        await settle()
        yield Prompt((4, 5), 1, is_complete=True)

    pausing = backend.generate(prompts(), SamplingParams())
    assert await anext(pausing) == Prefilled(0)
    await settle()
    await settle()
    assert decode.prompts == [((4, 5), True)]
    assert await asyncio.wait_for(answer(backend, (7,)), 60) == ["1", "2", "3"]
    assert [event.text async for event in pausing if isinstance(event, AnswerChunk)] == ["1", "2", "3"]


async def test_the_reservation_in_a_prefill_lane_is_released_when_the_decode_lane_begins() -> None:
    decode = FakeLane("decode")
    backend = await start_lanes([FakeLane("prefill")], [decode])
    decode.goes_on.clear()
    asking = asyncio.create_task(answer(backend, (5,)))
    await settle()
    assert backend._prefill_lanes is not None
    assert backend._decode_lanes is not None
    assert (backend._prefill_lanes._chooser.in_use(), backend._decode_lanes._chooser.in_use()) == (
        {"prefill-0"},
        {"decode-0"},
    )
    decode.goes_on_after_first.clear()
    decode.goes_on.set()
    await settle()
    assert (backend._prefill_lanes._chooser.in_use(), backend._decode_lanes._chooser.in_use()) == (set(), {"decode-0"})
    decode.goes_on_after_first.set()
    await asking
    assert backend._decode_lanes._chooser.in_use() == set()


async def test_questions_go_to_the_lane_that_has_the_data_of_their_session() -> None:
    prefill = [FakeLane("prefill"), FakeLane("prefill")]
    backend = DisaggregatedBackend(prefill, [FakeLane("decode")], router="soonest")
    await backend.start(lambda line: None)
    data = tuple(range(2_000))

    async def session() -> AsyncIterator[Prompt]:
        yield Prompt(data[:1], 0, is_complete=False, request_class="stream")
        await settle()
        yield Prompt(data, 1, is_complete=False, request_class="stream")
        await asyncio.Event().wait()

    events = backend.generate(session(), SamplingParams())
    while await anext(events) != Prefilled(len(data) - 1):
        pass
    (with_data,) = [lane for lane in prefill if lane.prompts]
    for number in range(3):
        await answer(backend, (*data, 1_000 + number))
    assert len([prompt for prompt in with_data.prompts if prompt[1]]) == 3
    await events.aclose()


async def test_a_dead_lane_is_asked_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    prefill = [FakeLane("prefill"), FakeLane("prefill")]
    backend = await start_lanes(prefill, [FakeLane("decode")])
    prefill[1].is_dead = True
    backend.check_health()
    num_checks = prefill[1].num_health_checks
    for _ in range(3):
        backend.check_health()
    assert prefill[1].num_health_checks == num_checks
    assert [record.message for record in caplog.records] == ["prefill-1 has died: it was killed"]
    prefill[0].is_dead = True
    with pytest.raises(EngineDeadError, match="prefill-0: it was killed; prefill-1: it was killed"):
        backend.check_health()


async def test_try_reserve_finds_no_place_while_earlier_reservations_wait() -> None:
    backend = await start_lanes([FakeLane("prefill")], [FakeLane("decode")], max_open=1)
    lanes, prompt = backend._decode_lanes, Prompt((5,), 0, is_complete=True)
    assert lanes is not None
    first = lanes.try_reserve(prompt)
    assert first is not None
    waiting = [asyncio.create_task(lanes.reserve(prompt)) for _ in range(2)]
    await settle()
    lanes.release(first)
    for task in waiting:
        while not task.done():
            assert lanes.try_reserve(prompt) is None
            await asyncio.sleep(0)
        lanes.release(task.result())
    assert lanes.try_reserve(prompt) is not None


async def test_lanes_that_differ_are_refused_by_name_and_closed() -> None:
    prefill, decode = FakeLane("prefill"), FakeLane("decode")
    common = {"dtype": "float32", "block_size": "16"}
    decode.lane_facts = LaneFacts(common, block_size=16, num_blocks=10, max_num_seqs=1)
    message = "lanes differ in block_size: 2 in prefill-0, 16 in decode-0"
    with pytest.raises(ConfigurationError, match=message):
        await start_lanes([prefill], [decode])
    assert prefill.is_closed
    assert decode.is_closed


async def test_errors_of_the_prompts_are_raised() -> None:
    backend = await start_lanes([FakeLane("prefill")], [FakeLane("decode")])

    async def failing() -> AsyncIterator[Prompt]:
        yield Prompt((5,), 0, is_complete=False)
        raise SourceError("no pages")

    with pytest.raises(SourceError, match="no pages"):
        async for _ in backend.generate(failing(), SamplingParams()):
            pass


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "message"),
    [
        ([], ["decode"], {}, r'prefill=\[\] must be one or more VllmBackend\(lane="prefill"\)'),
        (["prefill"], ["prefill"], {}, r'must be one or more VllmBackend\(lane="decode"\)'),
        (["prefill"], [None], {}, r'must be one or more VllmBackend\(lane="decode"\)'),
        (["prefill"], ["decode"], {"router": "best"}, "no router 'best'"),
        (["prefill"], ["decode"], {"max_open": 0}, "max_open=0"),
    ],
)
def test_wrong_lanes_are_refused(prefill: list[Any], decode: list[Any], options: Any, message: str) -> None:
    lanes = ([VllmBackend("model", lane=lane) for lane in lanes] for lanes in (prefill, decode))
    with pytest.raises(ConfigurationError, match=message):
        DisaggregatedBackend(*lanes, **options)


def test_a_service_has_lanes_by_one_word() -> None:
    def lanes_of(**options: Any) -> list[VllmBackend]:
        given = {"model.name": "org/model", **{f"engine.{name}": value for name, value in options.items()}}
        settings = load(None, {}, given).settings
        backend = make_backend(settings.model, settings.engine)
        assert isinstance(backend, DisaggregatedBackend)
        return list(backend._backends.values())

    lanes = lanes_of(lanes="2+1", policy="fcfs", engine_args='{"max_num_seqs": 8}')
    assert [lane.lane for lane in lanes] == ["prefill", "prefill", "decode"]
    assert [lane._engine_args["max_num_seqs"] for lane in lanes] == [8, 8, 8]
    assert lanes[0]._engine_args["additional_config"]["streamrag"]["policy"] == "fcfs"
    on_devices = lanes_of(lanes="1+1", engine_args='{"device_ids": [0, 1, 2, 3], "tensor_parallel_size": 2}')
    assert [lane._engine_args["device_ids"] for lane in on_devices] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigurationError, match="cannot be divided among 3 lanes"):
        lanes_of(lanes="2+1", engine_args='{"device_ids": [0, 1]}')
