"""The gain of prefilling early on a server: times to the first token, of contexts that it has seen and of new ones."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from streamrag.backends.openai import OpenAIBackend
from streamrag.core import Prefilled, Progress, Prompt, SamplingParams
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError
from streamrag.support.clock import Clock

WORDS = "amber basin cedar delta ember fjord grove haven inlet jetty kelp lagoon marsh north ocean pebble quay river"
QUESTION = " Which of these words comes first? Answer:"
MIN_SAVED = 0.1
"""A smaller share of the time is what two requests differ by anyway."""
CHARACTERS_PER_TOKEN = 4
"""About; for servers that have no tokenizer to ask."""
ROOM = 64
"""Tokens for the question and the answer; and no context has fewer."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A context that the server had not seen and one that it had been sent: seconds to the first token of each."""

    cold_ttft_s: float
    warm_ttft_s: float
    warming_s: float
    """Seconds that the request took that sent the context ahead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of an examination."""

    server: str
    model: str
    max_model_len: int
    takes_token_ids: bool
    tokenizer: str
    num_prompt_tokens: int
    pairs: tuple[Pair, ...]

    @property
    def cold_ttft_s(self) -> float:
        return median(pair.cold_ttft_s for pair in self.pairs)

    @property
    def warm_ttft_s(self) -> float:
        return median(pair.warm_ttft_s for pair in self.pairs)

    @property
    def saved(self) -> float:
        """The share of the time to the first token that warming saves; the median of the pairs."""
        return median(1 - pair.warm_ttft_s / pair.cold_ttft_s for pair in self.pairs)

    @property
    def helps(self) -> bool:
        """Whether that is more than chance: most of it, in nearly all pairs."""
        num_sooner = sum(pair.warm_ttft_s < pair.cold_ttft_s for pair in self.pairs)
        return self.saved >= MIN_SAVED and num_sooner >= 0.8 * len(self.pairs)

    @property
    def verdict(self) -> str:
        if self.helps:
            return f"warming saves {self.saved:.0%} of the time to the first token: prefixes are reused"
        return (
            "warming gains nothing here: a context that was sent before takes as long as a new one. The server does "
            "not reuse prefixes across requests, or computing this prompt is a small part of the time"
        )


class ServerExaminer:
    """Asks one server, about contexts of `num_tokens`."""

    def __init__(self, backend: OpenAIBackend, num_tokens: int, counts_tokens: bool, clock: Clock) -> None:
        self._backend = backend
        self.num_tokens = num_tokens
        self.counts_tokens = counts_tokens
        """Whether they are tokens; else characters."""
        self._clock = clock
        self._random = random.Random()

    @classmethod
    async def of(cls, backend: OpenAIBackend, num_prompt_tokens: int, clock: Clock) -> "ServerExaminer":
        """Return an examiner that asks `backend`, which has started.

        :raises ConfigurationError: the model takes no prompt of that length.
        """
        model = backend.model
        ids = await in_thread(model.tokenizer, partial(model.tokenizer.encode, QUESTION))
        counts_tokens = ids != list(map(ord, QUESTION))
        per_token = 1 if counts_tokens else CHARACTERS_PER_TOKEN
        most = model.max_model_len // per_token - ROOM
        if num_prompt_tokens > most:
            raise ConfigurationError(
                f"{model.name} takes at most {model.max_model_len} {'tokens' if counts_tokens else 'characters'}: "
                + (f"ask with --prompt-tokens {most}" if most >= ROOM else "too few to see a difference")
            )
        return cls(backend, num_prompt_tokens * per_token, counts_tokens, clock)

    async def pairs(self, num_pairs: int, show: Progress) -> tuple[Pair, ...]:
        """Measure so many pairs, after one that does not count, in which the server loads what it loads at first."""
        found = []
        for number in range(num_pairs + 1):
            show(f"asking, {number} of {num_pairs}" if number else "asking once, to begin")
            is_warm_first = number % 2 == 0  # whatever gets slower or quicker meanwhile is in both
            warm = await self._measure(is_warm=True) if is_warm_first else None
            cold_s, _ = await self._measure(is_warm=False)
            warm_s, warming_s = warm or await self._measure(is_warm=True)
            found.append(Pair(cold_s, warm_s, warming_s))
        return tuple(found[1:])

    async def _measure(self, *, is_warm: bool) -> tuple[float, float]:
        """Return the seconds to the first token, and those that warming took before; the context is new each time."""
        context = await self._context()
        whole = (*context, *await self._encoded(QUESTION))
        is_warmed = asyncio.Event()
        begin_s = self._clock()

        async def prompts() -> AsyncIterator[Prompt]:
            nonlocal begin_s
            if is_warm:
                yield Prompt(context, 0, is_complete=False)
                await is_warmed.wait()
            warming_s, begin_s = self._clock() - begin_s, self._clock()
            times.append(warming_s)
            yield Prompt(whole, len(context) if is_warm else 0, is_complete=True)

        times: list[float] = []
        first_s: float | None = None
        async with aclosing(self._backend.generate(prompts(), SamplingParams(max_tokens=1))) as events:
            async for event in events:
                if isinstance(event, Prefilled):
                    is_warmed.set()
                elif first_s is None and (event.text or event.token_ids or event.finish_reason):
                    first_s = self._clock()  # the rest is awaited: the next request is to find an idle server
        if first_s is None:
            raise BackendError("the server's answer was empty")
        return first_s - begin_s, times[0]

    async def _context(self) -> tuple[int, ...]:
        words = WORDS.split()
        text = f"{self._random.getrandbits(64):x} " + " ".join(self._random.choices(words, k=self.num_tokens))
        ids = await self._encoded(text)
        if len(ids) < ROOM:  # the backend sends nothing ahead of so few
            raise BackendError(f"the tokenizer makes {len(ids)} tokens of {self.num_tokens:,} words, which is wrong")
        return tuple(ids[: self.num_tokens])

    async def _encoded(self, text: str) -> list[int]:
        tokenizer = self._backend.model.tokenizer
        return await in_thread(tokenizer, partial(tokenizer.encode, text))


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the findings as `--json` prints them."""
    derived = ("cold_ttft_s", "warm_ttft_s", "saved", "helps", "verdict")
    return {**asdict(finding), **{name: getattr(finding, name) for name in derived}}
