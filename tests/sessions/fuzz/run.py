"""One load, played to its end in virtual time: sessions, those who ask, the engine and its operator."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from streamrag import DeadlineExceededError, PipelineClosedError, Prompt, PromptTooLongError, SamplingParams
from streamrag.backends.simulated.engine import always
from streamrag.backends.vllm.scheduler.hooks import StreamingHooks, streaming_scheduler
from streamrag.sessions import Session, Watch
from tests.backends.vllm.client.fake_engine import cancelled_at
from tests.engine.fuzz.checks import Checks
from tests.engine.fuzz.clients import FuzzError, check
from tests.engine.fuzz.run import make_runner, make_shape
from tests.engine.sizes import container_sizes, what_has_grown

from .engine import LONGEST, CheckedEngine, OracleBackend, SimulatedCore, V1Runner, V2Runner, answer_to
from .load import ANSWERS, Load, SessionLoad, WatchLoad
from .truth import Asked, Truth

__all__ = ["Run", "instantly"]

T = TypeVar("T")

QUESTIONS = ("Is it so?", "Any over 90?", "What now?", "Who?", "Why?" * 20, "?" * 220)
WATCHED_S = 1_000.0
"""Within this virtual time all watches are answered, also those that seldom are."""
SETTLED_S = 60.0
"""Within this virtual time all that was ended has let go of the engine."""


async def instantly(function: Callable[[], T], *, limiter: anyio.CapacityLimiter, **_: Any) -> T:
    """In place of a thread, which in virtual time would take no time at all."""
    async with limiter:
        await asyncio.sleep(0.001)
        return function()


class Run:
    """One load. `met` counts what happened in it."""

    def __init__(self, load: Load, met: Counter[str], folder: Path) -> None:
        self.load = load
        self.met = met
        self.scenario = load.engine
        self.runner = make_runner(load.engine, V1Runner, V2Runner)
        shape = make_shape(load.engine, folder / "records.jsonl")
        del shape.streamrag["records"]
        self.engine = CheckedEngine(
            shape,
            self.runner,
            always(load.step_s),
            streaming_scheduler,
            has_v2_runner=load.engine.has_v2_runner,
        )
        assert isinstance(self.engine.scheduler, StreamingHooks)
        self.scheduler = self.engine.scheduler
        self.host_memory = self.scheduler.plugin.host_memory
        self.sizes_at_start = container_sizes(self.scheduler)
        run: Any = self  # of the fuzz of the scheduler it has what is looked at in each step
        self.engine.check = Checks(run).step

    async def play(self) -> None:
        noise: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(str(context)))
        core = SimulatedCore(self.engine, self.load.num_turns)
        self.backend = OracleBackend(core)
        engine = asyncio.create_task(core.run(), name="engine")
        users = asyncio.create_task(self._users(), name="users")
        await asyncio.wait([engine, users], return_when=asyncio.FIRST_COMPLETED)
        engine.cancel()
        with suppress(asyncio.CancelledError):
            await engine
        await users
        if self.backend.client.output_handler is not None:
            self.backend.client.output_handler.cancel()
        await asyncio.sleep(0.01)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        check(not left, f"tasks are left: {left}")
        check(not noise, f"the loop was told of {noise}")

    async def _users(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, load in enumerate(self.load.sessions):
                rng = random.Random(f"{self.scenario.seed} {number}")
                group.create_task(_Desk(self, f"session {number}", load, rng).play())
            group.create_task(self._operate(random.Random(f"{self.scenario.seed} operator")))
            for number in range(self.load.num_plain):
                group.create_task(self._plain(random.Random(f"{self.scenario.seed} plain {number}")))
        await asyncio.sleep(SETTLED_S)
        self._nothing_is_left()

    async def _plain(self, rng: random.Random) -> None:
        """Somebody else's request."""
        await asyncio.sleep(rng.uniform(0, self.load.spread_s))
        prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(1, LONGEST - 1)))
        params = _params(rng.randrange(1, 12))
        chunks = self.backend.generate(_one(prompt), params)
        token_ids = tuple([token_id async for chunk in chunks for token_id in getattr(chunk, "token_ids", ())])
        check(token_ids == answer_to(prompt, params), "somebody else's answer is wrong")
        self.met["requests of others"] += 1

    # ------------------------------------------------------------------------------------------------- the operator

    async def _operate(self, rng: random.Random) -> None:
        acts = [self._evict] * self.load.num_evictions + [self._reset] * self.load.num_resets
        rng.shuffle(acts)
        for act in acts:
            await asyncio.sleep(rng.expovariate(len(acts) / self.load.spread_s))
            nth = rng.randrange(100)
            self.engine.do(lambda act=act, nth=nth: act(nth))

    def _evict(self, nth: int) -> None:
        memory = self.scheduler.plugin.kv_memory
        holders: list[Any] = [r for r in self.scheduler.requests.values() if memory.num_blocks(r)]  # type: ignore[arg-type]
        if holders:
            self.met["forced preemptions"] += 1
            self.scheduler.plugin.evictions.evict(holders[nth % len(holders)])

    def _reset(self, nth: int) -> None:
        if self.scheduler.reset_prefix_cache(True, nth % 2 == 0):
            self.met["prefix cache resets"] += 1
            self.runner.load_weights()

    # -------------------------------------------------------------------------------------------------- when it ends

    def _nothing_is_left(self) -> None:
        scheduler = self.scheduler
        check(not scheduler.requests, f"requests are left: {list(scheduler.requests)}")
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        check(num_free == self.scenario.num_blocks, f"{self.scenario.num_blocks - num_free} blocks are leaked")
        check(not self.runner.rows, f"the runner still remembers {list(self.runner.rows)}")
        check(not self.backend.client.output_processor.request_states, "vLLM's client still remembers requests")
        grown = what_has_grown(scheduler, self.sizes_at_start)
        check(not grown, f"all are gone, and something of them is remembered: {grown}")
        if self.host_memory is not None:
            check(self.host_memory.pool.num_used == 0, f"{self.host_memory.pool.num_used} host slots are leaked")
            self.met["host blocks saved"] += self.runner.num_saved
            self.met["host blocks loaded"] += self.runner.num_loaded
            self.met["host blocks not loaded"] += self.runner.num_not_loaded
        scheduler.shutdown()


class _Desk:
    """A session, who feeds it and who asks it."""

    def __init__(self, run: Run, name: str, load: SessionLoad, rng: random.Random) -> None:
        self.run, self.load, self.rng, self.met = run, load, rng, run.met
        self.truth = Truth(name, load.system, load.window_tokens, load.slide_share)
        self.session = Session(
            run.backend,
            system=load.system,
            window_tokens=load.window_tokens,
            slide_share=load.slide_share,
            max_waiting=load.max_waiting,
            name=name,
            clock=asyncio.get_running_loop().time,
        )
        self.is_closing = False
        self.watches: list[Watch] = []
        self.asked: list[Asked] = []

    async def play(self) -> None:
        try:
            await self.session.start()
        except PromptTooLongError:
            check(
                self.load.window_tokens + len(self.truth.prompt(0, "")) > LONGEST - 60, "the window would have fitted"
            )
            await self.session.aclose()
            return
        async with asyncio.TaskGroup() as group:
            versions = group.create_task(self._note_versions())
            rest = [self._feed(), *(self._ask() for _ in range(self.load.num_askers))]
            rest += [self._watch(watch) for watch in self.load.watches]
            tasks = [group.create_task(each) for each in rest]
            if self.load.closes_at_s is not None:
                await asyncio.sleep(self.load.closes_at_s)
                self.met["sessions closed early"] += 1
            else:
                await asyncio.wait(tasks[: 1 + self.load.num_askers])
                await self._settle()
                for watch in self.watches:
                    await self._reaches_the_newest(watch)
            self.is_closing = True
            await self._close()
            await versions
        for asked in self.asked:
            self.truth.check_answer(asked)
            self.met["answers checked"] += 1
            self.met["answers that were there already"] += asked.answer.record is None
        self.met["slides"] += self.truth.num_slides
        self.met["versions"] += len(self.truth.data)
        self.met["chunks dropped"] += len(self.truth.dropped)

    async def _close(self) -> None:
        with suppress(asyncio.CancelledError):
            await cancelled_at(self.rng.choice([(), (1,), (2,)]), self.session.aclose())
        await self.session.aclose()

    async def _note_versions(self) -> None:
        with suppress(PipelineClosedError):
            async for version in self.session.versions():
                self.truth.stands(version)

    async def _feed(self) -> None:
        freezes = list(self.load.freezes)
        with self._closing():
            for number in range(self.load.num_texts):
                if freezes and self.rng.random() < 0.3:
                    try:
                        await self.truth.freeze(self.session, freezes.pop())
                        self.met["system texts frozen"] += 1
                    except PromptTooLongError:
                        self.met["system texts too long"] += 1
                words = "".join(self.rng.choice("ab 01\t") for _ in range(self.rng.randint(0, self.load.longest)))
                await self.truth.append(self.session, self.rng.choice([words, f"{number} {words}"]))
                if self.load.gap_s and self.rng.random() < 0.7:
                    await asyncio.sleep(self.rng.expovariate(1 / self.load.gap_s))

    async def _settle(self) -> None:
        """All data are taken in, and all watches answered."""
        newest, params = len(self.truth.texts), _params(3)
        stream = self.session.ask("?", at_least=newest, params=params)
        with suppress(PromptTooLongError):
            _ = [chunk async for chunk in stream]
            check(stream.result.version == newest, f"{self.truth.name}: version {stream.result.version}")
            self.asked.append(Asked("?", stream.result, params))
        check(self.session.state.num_failures == 0, f"{self.truth.name}: the engine gave its stream up")
        check(self.run.backend.num_open[self.truth.name] <= 1, f"{self.truth.name} holds an older stream")

    async def _reaches_the_newest(self, watch: Watch) -> None:
        try:
            async with asyncio.timeout(WATCHED_S):
                await watch.at_least(len(self.truth.texts))
        except TimeoutError:
            raise FuzzError(
                f"{self.truth.name}: {watch.question!r} is left at {watch.version}: {watch.error}"
            ) from None
        except (PromptTooLongError, PipelineClosedError):  # it was closed itself, or said so to its reader
            pass

    # ------------------------------------------------------------------------------------------------------ questions

    async def _ask(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, self.run.load.spread_s))
        for _ in range(rng.choice([1, 1, 3])):
            ask = self._one_question()
            how = rng.choice(["stays", "stays", "is cancelled where it waits", "is cancelled after some time"])
            if how == "is cancelled where it waits":
                ask = _quietly(cancelled_at({rng.randrange(1, 12)}, ask))
            elif how == "is cancelled after some time":
                ask = _within(rng.expovariate(1 / (self.run.load.step_s * rng.choice([1, 10]))), ask)
            self.met[f"asked: {how}"] += 1
            await ask

    async def _one_question(self) -> None:
        rng, truth = self.rng, self.truth
        question = rng.choice(QUESTIONS)
        params = rng.choice([_params(1), _params(3), _params(12), SamplingParams(max_tokens=4), None])
        answers = rng.choice([(), (), *ANSWERS])
        appended = len(truth.texts)
        at_least = rng.choice([None, appended, rng.randint(0, appended)])
        deadline_s = rng.choice([None, None, None, self.run.load.step_s * 5])
        leaves_after = rng.choice([None, None, 1])
        with self._closing():
            try:
                async with self.session.ask(
                    question, answers=answers, at_least=at_least, params=params, deadline_s=deadline_s
                ) as stream:
                    async for _ in stream:
                        if leaves_after == 1:
                            self.met["askers who left in the middle"] += 1
                            return
                answer = stream.result
            except DeadlineExceededError:
                check(deadline_s is not None, "a deadline that nobody has set")
                self.met["deadlines passed"] += 1
                return
            except PromptTooLongError:
                await asyncio.sleep(0)  # for whoever notes versions
                check(truth.can_be_too_long(question, answers), f"{truth.name}: {question!r} would have fitted")
                self.met["questions too long"] += 1
                return
            check((answer.version or 0) >= (at_least or 0), f"{truth.name}: {answer.version} for at least {at_least}")
            self.asked.append(Asked(question, answer, params or SamplingParams(), answers))
            self.met["answers of few, that were there already"] += bool(answers) and answer.record is None

    async def _watch(self, load: WatchLoad) -> None:
        await asyncio.sleep(load.from_s)
        with self._closing():
            params = _params(load.max_tokens)
            watch = self.session.watch(
                load.question,
                answers=load.answers,
                min_interval_s=load.min_interval_s,
                priority=load.priority,
                params=params,
            )
            self.watches.append(watch)
            newest, text = -1, None
            try:
                async with asyncio.timeout(None if load.until_s is None else load.until_s - load.from_s):
                    async for answered in watch:
                        check(answered.version > newest, f"{self.truth.name}: a watch goes back to {answered.version}")
                        check(answered.text != text, f"{self.truth.name}: a watch repeats {text!r}")
                        newest, text = answered.version, answered.text
                        check(answered.text == answered.answer.text, "another text than its answer's")
                        check(answered.version == answered.answer.version, "another version than its answer's")
                        self.asked.append(Asked(load.question, answered.answer, params, load.answers))
                        self.met["watched answers"] += 1
                        self.met["watched answers of few"] += bool(load.answers)
            except TimeoutError:
                await watch.aclose()
            except PromptTooLongError:
                can_be = self.truth.can_be_too_long(load.question, load.answers)
                check(can_be, f"{self.truth.name}: {load.question!r} fits")

    def _closing(self) -> "_Closing":
        return _Closing(self)


class _Closing:
    """Around what may be told that the session was closed, but not before it was."""

    def __init__(self, desk: _Desk) -> None:
        self._desk = desk

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, PipelineClosedError):
            check(self._desk.is_closing, f"{self._desk.truth.name} is said to be closed: {error}")
            self._desk.met["told that the session was closed"] += 1
            return True
        return False


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


async def _one(prompt: tuple[int, ...]) -> Any:
    yield Prompt(prompt, 0, is_complete=True)


async def _quietly(task: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        await task


async def _within(seconds: float, coroutine: Coroutine[Any, Any, None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coroutine
