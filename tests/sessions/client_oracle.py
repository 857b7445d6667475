"""The client side of a session against a list: what each question's prompt must be, worked out from what was appended.

    python -m tests.sessions.client_oracle --seeds 20000

Uses nothing of the engine, of `sessions.window`, or of how prompts are assembled. The backend answers with a digest of
the prompt, so that an answer is right if and only if its prompt was, token by token.
"""

import argparse
import asyncio
import hashlib
import random
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from streamrag import Pipeline, SamplingParams
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Prompt
from streamrag.errors import BackendError
from streamrag.testing import ScriptedSource

SYSTEM = "Watch."
QUESTIONS = ("Is it so?", "Any over 90?", "What now?", "Who?")
CHOICES = ("yes", "no")
LONGEST = 2_000


def prompt_of(system: str, data: str, question: str) -> str:
    """The whole prompt, as a person would write it down."""
    before = f"{system}\n\n" if system else ""
    return f"{before}User: Data:\n\n{data or '(no data yet)' + chr(10)}\nQuestion: {question}\n\nAssistant:"


def digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


class DigestBackend:
    """Answers with the digest of the prompt; sometimes it is slow, or fails."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        self.model = ModelInfo("digest", CodePointTokenizer(), LONGEST)
        self.num_open = 0
        self.prompts: dict[str, str] = {}
        """By digest."""
        self._rng = rng
        self._failing = failing

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        self.num_open += 1
        try:
            async for prompt in prompts:
                await self._pause()
                yield Prefilled(len(prompt.token_ids) - 1)
            text = "".join(map(chr, prompt.token_ids))
            answer = digest(text)
            self.prompts[answer] = text
            if allowed := params.extra.get("allowed_token_ids"):
                answer = chr(allowed[int(answer, 16) % len(allowed)])
            for number, character in enumerate(answer, 1):
                await self._pause()
                yield AnswerChunk(character, (ord(character),), "stop" if number == len(answer) else None)
        finally:
            self.num_open -= 1

    async def _pause(self) -> None:
        if self._rng.random() < self._failing:
            raise BackendError("the engine has a bad day")
        if (kind := self._rng.random()) < 0.3:
            await asyncio.sleep(self._rng.choice([0.001, 0.05, 3.0]))
        elif kind < 0.6:
            await asyncio.sleep(0)


@dataclass
class Model:
    """A session as a list."""

    window_tokens: int
    kept: int
    events: list[tuple[str, str]] = field(default_factory=list)
    """Of each version, from 1: ("text", the text), or ("system", the system text)."""
    dropped: set[int] = field(default_factory=set)

    def prompt(self, version: int, question: str) -> str:
        system, window = SYSTEM, []
        for number, (kind, text) in enumerate(self.events[:version], 1):
            if kind == "system":
                system = text
            elif number not in self.dropped:
                line = f"{text}\n"
                window.append(
                    line if len(line) <= self.kept else line[: self.kept - 1] + "\n" if self.kept > 1 else line[:1]
                )
                if sum(map(len, window)) > self.window_tokens:
                    while sum(map(len, window)) > self.kept:
                        del window[0]
        return prompt_of(system, "".join(window), question)


class Play:
    """One seed."""

    def __init__(self, seed: int, met: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.met = met
        self.backend = DigestBackend(rng, rng.choice([0.0, 0.0, 0.002, 0.02]))
        window, share = rng.choice([1, 20, 60, 300]), rng.choice([0.1, 0.5, 0.9])
        self.model = Model(window, max(int(window * (1 - share)), 1))
        self.options: dict[str, Any] = {
            "system": SYSTEM,
            "window_tokens": window,
            "slide_share": share,
            "max_waiting": rng.choice([3, 4096, 4096]),
            "batch_interval_s": rng.choice([0.0, 0.0, 0.5]),
        }

    async def play(self) -> None:
        rng = self.rng
        async with Pipeline(ScriptedSource([]), self.backend) as pipeline:
            async with pipeline.session(**self.options) as self.session:
                async with asyncio.TaskGroup() as group:
                    actors = [self.appends, self.appends, self.freezes, self.watches, self.watches]
                    for actor in [*actors[: rng.randrange(1, 6)], *[self.asks] * rng.randrange(1, 8)]:
                        group.create_task(actor(random.Random(rng.random())))
                for _ in range(3):  # what stands in the end
                    await self.ask(random.Random(rng.random()), at_least=len(self.model.events))
                state = self.session.state
                assert state.num_appended == len(self.model.events), "what was cancelled has been appended"
                assert state.num_dropped == len(self.model.dropped)
            assert self.backend.num_open == 0, "requests are left"
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"

    # --------------------------------------------------------------------------------------------------- who is there

    async def appends(self, rng: random.Random) -> None:
        for _ in range(rng.choice([0, 3, 12, 40])):
            await asyncio.sleep(rng.choice([0, 0, 0.01, 1.0]))
            texts = [
                "x" * rng.choice([0, 1, 5, 12, 40, 200]) + str(rng.random())[:5] for _ in range(rng.randrange(1, 4))
            ]
            if rng.random() < 0.7:
                await self.perhaps_cancelled(rng, self.append(texts[0]))
            else:
                await self.perhaps_cancelled(rng, self.extend(texts))

    async def append(self, text: str) -> None:
        self.noted([text], await self.session.append(text))

    async def extend(self, texts: list[str]) -> None:
        self.noted(texts, await self.session.extend(texts))

    def noted(self, texts: list[str], version: int) -> None:
        self.model.events += [("text", text) for text in texts]
        assert version == len(self.model.events), "versions count what was appended"
        self.met["chunks"] += len(texts)
        state = self.session.state  # no turn of the loop has passed: those that wait are the newest
        data = [number for number, (kind, _) in enumerate(self.model.events, 1) if kind == "text"]
        older = [number for number in data[: len(data) - state.num_waiting] if number not in self.model.dropped]
        num_new = state.num_dropped - len(self.model.dropped)
        self.model.dropped.update(older[len(older) - num_new :])
        self.met["dropped"] += num_new

    async def freezes(self, rng: random.Random) -> None:
        for _ in range(rng.choice([1, 4])):
            await asyncio.sleep(rng.choice([0, 0.02, 2.0]))
            await self.perhaps_cancelled(rng, self.freeze(rng.choice(["", "Watch.", "A document." * 9])))

    async def freeze(self, system: str) -> None:
        version = await self.session.freeze(system)
        self.model.events.append(("system", system))
        assert version == len(self.model.events)
        self.met["freezes"] += 1

    async def asks(self, rng: random.Random) -> None:
        newest = 0
        for _ in range(rng.choice([1, 5, 15])):
            await asyncio.sleep(rng.choice([0, 0, 0.05, 1.0]))
            at_least = rng.choice([None, None, newest, len(self.model.events)])
            before = self.session.version
            version = await self.perhaps_cancelled(rng, self.ask(rng, at_least))
            if version is not None:
                assert version >= before, "an answer from older data than stood when it was asked"
                newest = max(newest, version)

    async def ask(self, rng: random.Random, at_least: int | None) -> int | None:
        question, few = rng.choice(QUESTIONS), rng.random() < 0.3
        params = SamplingParams(temperature=rng.choice([0.0, 0.0, 1.0]))
        stream = self.session.ask(question, at_least=at_least, params=params, answers=CHOICES if few else ())
        try:
            async with stream:
                shown = "".join([chunk.text async for chunk in stream])
        except BackendError:
            self.met["failures"] += 1
            return None
        answer = stream.result
        assert answer.version >= (at_least or 0)
        assert shown == answer.text, "the pieces are not the whole"
        self.check(question, answer.text, answer.version, few=few)
        return answer.version

    async def watches(self, rng: random.Random) -> None:
        question, few = rng.choice(QUESTIONS), rng.random() < 0.3
        watch = self.session.watch(question, answers=CHOICES if few else (), min_interval_s=rng.choice([0.0, 0.0, 0.3]))
        told: str | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.choice([0.0, 0.5, 20.0])), watch:
                async for each in watch:
                    assert each.text != told, "told twice"
                    told = each.text
                    self.check(question, each.text, each.version, few=few)
                    self.met["watched"] += 1

    def check(self, question: str, text: str, version: int, *, few: bool) -> None:
        expected = self.model.prompt(version, question)
        if few:
            begins = sorted(ord(each[0]) for each in CHOICES)
            assert text[0] == chr(begins[int(digest(expected), 16) % len(begins)]), (
                f"to version {version}: {expected!r}"
            )
        else:
            asked = self.backend.prompts[text]
            assert asked == expected, f"version {version}:\n{asked!r}\n{expected!r}"
        self.met["answers"] += 1

    async def perhaps_cancelled(self, rng: random.Random, work: Coroutine[Any, Any, Any]) -> Any:
        """What it returns; None if it was cancelled after some turns, or some time, as some are."""
        task = asyncio.create_task(work)
        if rng.random() < 0.25:
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.2]))
            self.met["cancelled"] += task.cancel()
        with suppress(asyncio.CancelledError):
            return await task


def run_seed(seed: int, met: Counter[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with mock.patch("streamrag.sessions.ingestion.MAX_BATCH", (1, 4, 256)[seed % 3]):
            run_virtual(Play(seed, met).play())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    given = parser.parse_args()
    met: Counter[str] = Counter()
    num_failed = 0
    for seed in range(given.first, given.first + given.seeds):
        try:
            run_seed(seed, met)
        except Exception:
            num_failed += 1
            print(f"seed {seed}")
            if num_failed < 4:
                traceback.print_exc()
    print(dict(met), f"{num_failed} of {given.seeds} seeds failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
