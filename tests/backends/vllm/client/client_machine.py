"""What a program may do with streams, in any order, cancelled wherever it waits, against an engine that checks it.

The truth is what the pushes said: one that returned is in the engine's prompt, one that was cancelled or raised is not.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fake_engine import MAX_MODEL_LEN, FakeCore, cancelled_at, make_client, settle
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrag.backends.vllm.client import token_streams
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, PromptTooLongError, StreamRagError

TOKENS = st.one_of(st.lists(st.integers(10, 60), min_size=1, max_size=8), st.sampled_from([[], [20] * MAX_MODEL_LEN]))
RARELY = st.sampled_from([False] * 7 + [True])
CUTS = st.sampled_from([(), (), (), (1,), (2,), (3,), (1, 2)])
Cuts = tuple[int, ...]
HOW_IT_ENDS = st.sampled_from(
    [
        "its context is left",
        "it is aborted",
        "all are aborted",
        "vLLM refuses a chunk",
        "the engine gives it up",
        "the engine dies",
        *["not at all"] * 6,
    ]
)
WHICH = st.integers(0, 1)
STOP = SamplingParams(max_tokens=9, stop=("Z",))
OTHER = SamplingParams(max_tokens=7)
REFUSED = SamplingParams(max_tokens=8, extra={"prompt_logprobs": 1})
STOP_TOKEN = 60
"""The character Z, which is a stop text."""
UNKNOWN = 1_000_000
"""No token: vLLM's client refuses it when it takes the chunk, which is after the push."""


@dataclass
class Truth:
    """What one stream must be, as the program knows it."""

    stream: Any
    context: AbstractAsyncContextManager[Any]
    prompt: list[int]
    is_complete: bool
    has_stop_text: bool = True
    is_aborted: bool = False
    is_refused: bool = False
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False
    error: StreamRagError | None = None

    @property
    def request_id(self) -> str:
        return str(self.stream._outputs.request_id)


class ClientMachine(RuleBasedStateMachine):
    module: ModuleType = token_streams

    @initialize(num_turns=st.integers(0, 2))
    def starts(self, num_turns: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.noise: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.noise.append(str(context)))
        self.core = FakeCore(num_turns=num_turns)
        self.client = make_client(self.core)
        self.streams = self.module.TokenStreams(self.client)
        self.open: list[Truth] = []
        self.opens([20, 21, 22], is_complete=False, cuts=())
        self.opens([23], is_complete=False, cuts=())

    def run(self, coroutine: Coroutine[Any, Any, Any], cuts: Cuts = ()) -> Any:
        """What it returns, or the error that it raises, a cancellation too. Nothing here waits for anything slow."""

        async def limited() -> Any:
            try:
                async with asyncio.timeout(60):  # some mutants hang
                    return await cancelled_at(cuts, coroutine)
            except (StreamRagError, asyncio.CancelledError) as error:
                return error

        return self.loop.run_until_complete(limited())

    @property
    def is_dead(self) -> bool:
        return bool(self.core.resources.engine_dead)

    def one(self, which: int) -> Truth:
        return self.open[which % len(self.open)]

    # ------------------------------------------------------------------------------------------------------ the program

    @precondition(lambda self: len(self.open) < 2 or any(truth.is_complete for truth in self.open))
    @rule(token_ids=TOKENS, is_complete=RARELY, cuts=CUTS)
    def opens(self, token_ids: list[int], is_complete: bool, cuts: Cuts) -> None:
        if len(self.open) == 2:
            self.leaves(next(truth for truth in self.open if truth.is_complete))
        context = self.streams.open(Prompt(tuple(token_ids), is_complete=is_complete), STOP)
        found = self.run(context.__aenter__(), cuts)
        if isinstance(found, asyncio.CancelledError):
            assert cuts
        elif self.is_dead:
            assert isinstance(found, EngineDeadError)
        elif not 0 < len(token_ids) < MAX_MODEL_LEN:
            assert isinstance(found, ConfigurationError | PromptTooLongError)
        else:
            self.open.append(Truth(found, context, token_ids, is_complete))

    def pushed(self, truth: Truth, found: Any, prompt: list[int], *, is_complete: bool, cuts: Cuts) -> None:
        """Check what came of a push that was to make this prompt."""
        if found is None:
            may = not (self.is_dead or truth.is_aborted or truth.is_complete or truth.error)
            assert may, "a push into a stream that takes none was said to be done"
            assert 0 < len(prompt) < MAX_MODEL_LEN
            truth.prompt, truth.is_complete = prompt, is_complete
        elif isinstance(found, asyncio.CancelledError):
            assert cuts
        elif self.is_dead:
            assert isinstance(found, EngineDeadError)
        elif truth.is_aborted or truth.is_complete or truth.is_refused or truth.error:
            # What is wrong with the prompt itself is seen first where the news of the stream's end is still on its way.
            is_unread = truth.error is not None or truth.is_refused
            is_invalid = is_unread and not 0 < len(prompt) < MAX_MODEL_LEN
            assert isinstance(found, BackendError) or is_invalid, found
        else:
            expected = PromptTooLongError if prompt else ConfigurationError
            assert isinstance(found, expected), found
        assert (truth.stream.num_tokens, truth.stream.is_complete) == (len(truth.prompt), truth.is_complete)

    @precondition(lambda self: self.open)
    @rule(which=WHICH, token_ids=TOKENS, cuts=CUTS)
    def appends(self, which: int, token_ids: list[int], cuts: Cuts) -> None:
        truth = self.one(which)
        found = self.run(truth.stream.append(token_ids), cuts)
        self.pushed(truth, found, truth.prompt + token_ids, is_complete=False, cuts=cuts)

    @precondition(lambda self: self.open)
    @rule(which=WHICH, kept=st.integers(0, 70), token_ids=TOKENS, is_complete=RARELY, cuts=CUTS)
    def updates(self, which: int, kept: int, token_ids: list[int], is_complete: bool, cuts: Cuts) -> None:
        truth = self.one(which)
        prompt = truth.prompt[:kept] + token_ids
        found = self.run(truth.stream.update(Prompt(tuple(prompt), is_complete=is_complete)), cuts)
        self.pushed(truth, found, prompt, is_complete=is_complete, cuts=cuts)

    @precondition(lambda self: self.open)
    @rule(which=WHICH, token_ids=TOKENS, cuts=CUTS, params=st.sampled_from([None, OTHER, REFUSED, REFUSED, REFUSED]))
    def finishes(self, which: int, token_ids: list[int], cuts: Cuts, params: SamplingParams | None) -> None:
        truth = self.one(which)
        found = self.run(truth.stream.finish(token_ids, params=params), cuts)
        if params is REFUSED:
            assert isinstance(found, StreamRagError | asyncio.CancelledError)
            assert (truth.stream.num_tokens, truth.stream.is_complete) == (len(truth.prompt), truth.is_complete)
            return
        self.pushed(truth, found, truth.prompt + token_ids, is_complete=True, cuts=cuts)
        if found is None:
            self.loop.run_until_complete(settle())
            truth.has_stop_text = params is None
            if not truth.is_refused:
                assert self.core.held[truth.request_id].params.max_tokens == (params or STOP).max_tokens

    @precondition(lambda self: self.open)
    @rule(
        which=WHICH,
        parts=st.lists(st.tuples(st.lists(st.integers(10, 60), min_size=1, max_size=3), CUTS), min_size=2, max_size=3),
    )
    def several_tasks_append(self, which: int, parts: list[tuple[list[int], Cuts]]) -> None:
        truth = self.one(which)

        async def all_at_once() -> list[Any]:
            tasks = [cancelled_at(cuts, truth.stream.append(token_ids)) for token_ids, cuts in parts]
            return await asyncio.gather(*tasks, return_exceptions=True)

        found = self.run(all_at_once())
        added = [token_ids for (token_ids, _), each in zip(parts, found, strict=True) if each is None]
        truth.prompt = truth.prompt + [token for token_ids in added for token in token_ids]
        assert truth.stream.num_tokens == len(truth.prompt)
        for each, (_, cuts) in zip(found, parts, strict=True):
            if isinstance(each, asyncio.CancelledError):
                assert cuts
            elif self.is_dead:
                assert isinstance(each, EngineDeadError)

    def leaves(self, truth: Truth, cuts: Cuts = ()) -> None:
        self.open.remove(truth)
        found = self.run(truth.context.__aexit__(None, None, None), cuts)
        assert cuts or not isinstance(found, Exception)

    def appends_what_is_no_token(self, truth: Truth) -> None:
        prompt = [*truth.prompt, UNKNOWN]
        found = self.run(truth.stream.append([UNKNOWN]))
        self.pushed(truth, found, prompt, is_complete=False, cuts=())
        truth.is_refused |= found is None

    @precondition(lambda self: self.open)
    @rule(which=WHICH, cuts_of_each=st.lists(CUTS, min_size=1, max_size=3), is_early=st.booleans())
    def tasks_read(self, which: int, cuts_of_each: list[Cuts], is_early: bool) -> None:
        truth = self.one(which)

        async def read() -> list[Any]:
            await settle()
            reading = [cancelled_at(cuts, anext(truth.stream, None)) for cuts in cuts_of_each]
            await settle()
            if is_early:
                self.computes([30], is_last=True)
                await settle()
            late = [task for task in reading if not task.done()]
            assert not (late and self.must_say_something(truth)), "the iteration hangs"
            for task in late:
                task.cancel()
            return await asyncio.gather(*reading, return_exceptions=True)

        for found in self.run(read()):
            self.has_read(truth, found)

    def has_read(self, truth: Truth, found: Any) -> None:
        if isinstance(found, AnswerChunk):
            assert not truth.has_ended
            truth.tokens += found.token_ids
            truth.has_ended = found.finish_reason is not None
            if truth.has_ended:
                expected = self.core.answered[truth.request_id]
                if truth.has_stop_text and STOP_TOKEN in expected:
                    expected = expected[: expected.index(STOP_TOKEN) + 1]
                assert truth.tokens == expected
        elif found is None:
            assert truth.has_ended
        elif isinstance(found, StreamRagError):
            assert truth.is_aborted or truth.is_refused or self.is_dead
            assert truth.error in (None, found), "another error than the first time"
            truth.error = found
        elif isinstance(found, Prefilled):
            assert truth.is_complete or found.num_tokens == len(truth.prompt) - 1, "of an older prompt"
        else:
            assert isinstance(found, asyncio.CancelledError), found

    def must_say_something(self, truth: Truth) -> bool:
        return self.is_dead or truth.is_aborted or truth.is_refused or truth.has_ended

    @precondition(lambda self: self.open)
    @rule(which=WHICH, how=HOW_IT_ENDS, cuts=CUTS)
    def ends(self, which: int, how: str, cuts: Cuts) -> None:
        truth = self.one(which)
        if how == "its context is left":
            self.leaves(truth, cuts)
        elif how == "it is aborted":
            self.run(truth.stream.abort(), cuts)
            truth.is_aborted = True
        elif how == "all are aborted":
            self.run(self.streams.aclose(), cuts)
            for each in self.open:
                each.is_aborted = True
        elif how == "vLLM refuses a chunk":
            self.appends_what_is_no_token(truth)
        elif how == "the engine gives it up" and truth.request_id in self.core.held:
            self.core.give_up(truth.request_id)
            truth.is_refused = True
        elif how == "the engine dies":
            self.core.die()

    # ------------------------------------------------------------------------------------------------------- the engine

    @rule(token_ids=st.lists(st.sampled_from([30, 31, 32, STOP_TOKEN]), min_size=1, max_size=3), is_last=st.booleans())
    def computes(self, token_ids: list[int], is_last: bool) -> None:
        for request_id, held in list(self.core.held.items()):
            self.core.acknowledge(request_id)
            if held.is_complete:
                self.core.answer(request_id, token_ids, is_last=is_last)

    # ------------------------------------------------------------------------------------------------ what always holds

    @invariant()
    def the_engine_holds_what_was_pushed_and_nothing_else(self) -> None:
        self.loop.run_until_complete(settle())
        assert not self.core.problems
        if self.is_dead:
            return
        alive = {truth.request_id: truth for truth in self.open if not truth.is_aborted and not truth.is_refused}
        known = alive.keys() | {truth.request_id for truth in self.open if truth.is_refused and not truth.is_aborted}
        assert self.core.held.keys() <= known
        assert self.client.output_processor.request_states.keys() <= known
        for request_id, truth in alive.items():
            held = self.core.held.get(request_id)
            assert not (held and truth.has_ended), "the engine goes on behind the end of the answer"
            assert held or request_id in self.core.answered
            if held:
                assert (held.prompt, held.is_complete) == (truth.prompt, truth.is_complete)
        tasks = [task for task in asyncio.all_tasks(self.loop) if task is not self.client.output_handler]
        assert len(tasks) <= len(known), tasks
        assert not self.noise

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            for truth in self.open:
                self.run(truth.context.__aexit__(None, None, None))
            self.loop.run_until_complete(settle())
            assert self.is_dead or not self.core.held
            tasks = asyncio.all_tasks(self.loop) - {self.client.output_handler}
            assert not tasks
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(settle())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
