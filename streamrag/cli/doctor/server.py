"""Measurement of prefix reuse on a server: times to the first token with new contexts, and with contexts sent ahead."""

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
MIN_SAVED = 0.1  # minimum share of the time that warming must save; smaller differences are noise
CHARACTERS_PER_TOKEN = 4  # approximate; for servers without a tokenizer
ROOM = 64  # tokens reserved for the question and the answer, and the minimum length of a context


@dataclass(frozen=True, slots=True)
class Pair:
    """The seconds to the first token with a new (cold) context, and with one sent ahead (warm)."""

    cold_ttft_s: float
    warm_ttft_s: float
    warming_s: float
    """Duration of the request that sent the context ahead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A server's properties, and the measured pairs."""

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
        """Share of the time to the first token that warming saves: the median of the pairs."""
        return median(1 - pair.warm_ttft_s / pair.cold_ttft_s for pair in self.pairs)

    @property
    def helps(self) -> bool:
        """Whether warming saves a significant share of the time, in at least 80% of the pairs."""
        num_sooner = sum(pair.warm_ttft_s < pair.cold_ttft_s for pair in self.pairs)
        return self.saved >= MIN_SAVED and num_sooner >= 0.8 * len(self.pairs)

    @property
    def verdict(self) -> str:
        """Sentence with the share of time that warming saves; unless `helps`, with the causes for no gain."""
        if self.helps:
            return (
                f"warming saves up to {self.saved:.0%} of the time to the first token: the server reuses prefixes. A "
                "query gains no more than the time that its retrieval goes on after the first result"
            )
        return (
            "warming gains nothing here: a context that was sent ahead takes as long as a new one. The server does "
            "not reuse prefixes across requests, or prefill is a small part of the time"
        )


class ServerExaminer:
    """A client that measures one server with contexts of `num_tokens`."""

    def __init__(self, backend: OpenAIBackend, num_tokens: int, counts_tokens: bool, clock: Clock) -> None:
        self._backend = backend
        self.num_tokens = num_tokens
        self.counts_tokens = counts_tokens
        """Whether `num_tokens` counts tokens; otherwise characters."""
        self.measured: list[Pair] = []  # with the one to warm up
        self._clock = clock
        self._random = random.Random()

    @classmethod
    async def of(cls, backend: OpenAIBackend, num_prompt_tokens: int, clock: Clock) -> "ServerExaminer":
        """Return an examiner for contexts of `num_prompt_tokens`; without a tokenizer, a token counts as 4 characters.

        :raises ConfigurationError: a context and `ROOM` more tokens exceed the model's length.
        """
        model = backend.model
        counts_tokens = model.unit == "tokens"
        per_token = 1 if counts_tokens else CHARACTERS_PER_TOKEN
        most = model.max_model_len // per_token - ROOM
        if num_prompt_tokens > most:
            raise ConfigurationError(
                f"{model.name} takes at most {model.max_model_len} {'tokens' if counts_tokens else 'characters'}: "
                + (f"use --prompt-tokens {most}" if most >= ROOM else "too few to measure a difference")
            )
        return cls(backend, num_prompt_tokens * per_token, counts_tokens, clock)

    async def pairs(self, num_pairs: int, show: Progress) -> tuple[Pair, ...]:
        """Measure pairs of new contexts, cold or warm first in turn, after a warm-up pair that is discarded."""
        for number in range(num_pairs + 1):
            show(f"measuring, {number} of {num_pairs}" if number else "measuring once to warm up")
            is_warm_first = number % 2 == 0  # alternate, so that drift affects both alike
            warm = await self._measure(is_warm=True) if is_warm_first else None
            cold_s, _ = await self._measure(is_warm=False)
            warm_s, warming_s = warm or await self._measure(is_warm=True)
            self.measured.append(Pair(cold_s, warm_s, warming_s))
        return tuple(self.measured[1:])

    def smaller_options(self, num_prompt_tokens: int, num_pairs: int) -> str:
        """Return options that would have taken about half the time until now."""
        share = min(max(len(self.measured), 0.5) / 6, 1)  # two pairs, and one to warm up
        return f"--prompt-tokens {max(int(share * num_prompt_tokens), ROOM)} --repetitions {min(num_pairs, 2)}"

    async def _measure(self, *, is_warm: bool) -> tuple[float, float]:
        """Return the seconds from a complete prompt to its first token, and those to send its context ahead.

        Each call has a new context. Unless `is_warm`, nothing is sent ahead, and the second number is about 0.

        :raises BackendError: the answer is empty.
        """
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
                    first_s = self._clock()  # keep reading, so that the server is idle for the next request
        if first_s is None:
            raise BackendError("the server's answer was empty")
        return first_s - begin_s, times[0]

    async def _context(self) -> tuple[int, ...]:
        """Return at most `num_tokens` ids of new random words. Raises BackendError if there are fewer than `ROOM`."""
        words = WORDS.split()
        text = f"{self._random.getrandbits(64):x} " + " ".join(self._random.choices(words, k=self.num_tokens))
        ids = await self._encoded(text)
        if len(ids) < ROOM:  # the backend does not send shorter contexts ahead
            raise BackendError(f"the tokenizer returned only {len(ids)} tokens for {self.num_tokens:,} words")
        return tuple(ids[: self.num_tokens])

    async def _encoded(self, text: str) -> list[int]:
        tokenizer = self._backend.model.tokenizer
        return await in_thread(tokenizer, partial(tokenizer.encode, text))


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the finding's fields with the figures that follow from them."""
    derived = ("cold_ttft_s", "warm_ttft_s", "saved", "helps", "verdict")
    return {**asdict(finding), **{name: getattr(finding, name) for name in derived}}
