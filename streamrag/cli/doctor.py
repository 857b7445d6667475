"""`streamrag doctor`: whether this machine can serve, or whether a server that is there gains from prefilling early."""

import argparse
import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table

from streamrag.backends.openai import OpenAIBackend
from streamrag.cli import machine
from streamrag.cli.option_types import positive, seconds
from streamrag.cli.output import Output, markup
from streamrag.cli.steps import shown_starting
from streamrag.clock import Clock, monotonic
from streamrag.core import Prefilled, Progress, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, DeadlineExceededError
from streamrag.tokenizing import in_thread

DESCRIPTION = """\
Says what this machine has for `streamrag serve`, what keeps it from that, and
what to do about it: packages, engine, device, memory for a model, a free port.

With --server: asks a server the same kind of question twice: once with a context that it has
never seen, and once with one that it was sent before, as streamrag does while
retrieval still runs. Says whether the first token comes sooner, and by how much.
"""
EPILOG = """\
examples:
  streamrag doctor
  streamrag doctor --model ./Llama-3.1-8B-Instruct --port 8080
  streamrag doctor --server http://127.0.0.1:8000
  streamrag doctor --server http://127.0.0.1:8080 --max-model-len 8192        what does not say how long prompts may be
  streamrag doctor --server https://api.example.com/v1 --model large --api-key KEY --prompt-tokens 4000

The exit status is 1 if this machine cannot serve. With --server, contexts are random words, new ones each time, so
that nothing is known of a cold one. The request that warms has the whole context, but not the
question behind it. Nothing else should use the server meanwhile.
"""

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
    """One context that the server had not seen, and one that it had been sent: seconds to the first token of each."""

    cold_ttft_s: float
    warm_ttft_s: float
    warming_s: float
    """Seconds that the request took that sent the context ahead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command is told, and what runs it."""
    parser.usage = "%(prog)s [--server URL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--server", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name there (the only one, if there is one), or its folder here"
    )
    parser.add_argument(
        "--port", type=positive, default=8080, metavar="N", help="to listen on, without --server (%(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer (the server's own, if it has one)")
    parser.add_argument("--api-key", metavar="KEY", help="OPENAI_API_KEY in the environment unless given")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt (the server is asked)")
    parser.add_argument(
        "--prompt-tokens", type=_context_length, default=2000, metavar="N", help="length of each context (%(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=5, metavar="N", help="pairs to ask (%(default)s)")
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="give up after so many seconds (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON instead")
    parser.set_defaults(run=_run)


def _context_length(text: str) -> int:
    if (value := positive(text)) < ROOM:
        raise argparse.ArgumentTypeError(f"{text} tokens are too few to see a difference: at least {ROOM}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    if arguments.server is None:
        return _look_at_machine(arguments)
    finding = asyncio.run(_examine(arguments))
    output = Output()
    if arguments.json:
        output.print_json_text(as_json(finding))
    else:
        _print(finding, output)
    return 0


def _look_at_machine(arguments: argparse.Namespace) -> int:
    found = machine.examine(arguments.model, port=arguments.port)
    output = Output()
    if arguments.json:
        output.print_json_text(machine.as_json(found))
        return 1 if found.problems else 0
    for name, text in machine.lines_of(found):
        output.print_line(f"{name}: {text}")
    for problem in found.problems:
        output.print_line(markup("[red]problem:[/] {}", problem))
    for line in found.advice:
        output.print_line(markup("[yellow]if you want[/] {}", line))
    output.print_line("this machine cannot serve as it is" if found.problems else "this machine can serve")
    return 1 if found.problems else 0


async def _examine(arguments: argparse.Namespace) -> Finding:
    progress = Output(stderr=True)
    with shown_starting(progress) as show:
        backend = OpenAIBackend(
            arguments.server,
            arguments.model,
            tokenizer=arguments.tokenizer,
            api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
            max_model_len=arguments.max_model_len,
            timeout_s=arguments.timeout,
        )
        try:
            async with asyncio.timeout(arguments.timeout) as limit:
                await backend.start(show)
                doctor = await Doctor.of(backend, arguments.prompt_tokens, monotonic)
                pairs = await doctor.pairs(arguments.repetitions, show)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"{arguments.server} was not done in {arguments.timeout:g} s. Give it more time with --timeout, or "
                "ask less with --repetitions or --prompt-tokens"
            ) from None
        finally:
            await backend.aclose()
    model, counts_tokens = backend.model, doctor.counts_tokens
    return Finding(
        server=arguments.server,
        model=model.name,
        max_model_len=model.max_model_len,
        takes_token_ids=model.is_exact,
        tokenizer=arguments.tokenizer or ("the server's" if counts_tokens else "none: characters are counted"),
        num_prompt_tokens=doctor.num_tokens,
        pairs=pairs,
    )


class Doctor:
    """Asks one server, about contexts of `num_tokens`."""

    def __init__(self, backend: OpenAIBackend, num_tokens: int, counts_tokens: bool, clock: Clock) -> None:
        self._backend = backend
        self.num_tokens = num_tokens
        self.counts_tokens = counts_tokens
        """Whether they are tokens; else characters."""
        self._clock = clock
        self._random = random.Random()

    @classmethod
    async def of(cls, backend: OpenAIBackend, num_prompt_tokens: int, clock: Clock) -> "Doctor":
        """One that asks `backend`, which has started.

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
        """So many pairs, behind one that does not count, in which the server loads what it loads at first."""
        found = []
        for number in range(num_pairs + 1):
            show(f"asking, {number} of {num_pairs}" if number else "asking once, to begin")
            is_warm_first = number % 2 == 0  # whatever gets slower or quicker meanwhile is in both
            warm = await self._asked(is_warm=True) if is_warm_first else None
            cold_s, _ = await self._asked(is_warm=False)
            warm_s, warming_s = warm or await self._asked(is_warm=True)
            found.append(Pair(cold_s, warm_s, warming_s))
        return tuple(found[1:])

    async def _asked(self, *, is_warm: bool) -> tuple[float, float]:
        """Seconds to the first token, and those that warming took before; the context is new each time."""
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
    """What was found, as `--json` prints it."""
    derived = ("cold_ttft_s", "warm_ttft_s", "saved", "helps", "verdict")
    return {**asdict(finding), **{name: getattr(finding, name) for name in derived}}


def _print(finding: Finding, output: Output) -> None:
    sent = "token ids, exact" if finding.takes_token_ids else "text, which the server tokenises in its own way"
    for name, value in {
        "server": finding.server,
        "model": f"{finding.model}, prompts of at most {finding.max_model_len:,}",
        "tokenizer": finding.tokenizer,
        "prompts are sent as": sent,
    }.items():
        output.print_line(f"{name}: {value}")
    table = Table("time to the first token, ms", "median", "least", "most", box=None, pad_edge=False)
    columns = {
        "a context it has not seen": [pair.cold_ttft_s for pair in finding.pairs],
        "one it was sent before": [pair.warm_ttft_s for pair in finding.pairs],
        "(sending it before)": [pair.warming_s for pair in finding.pairs],
    }
    for name, times in columns.items():
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in (median(times), min(times), max(times))))
    output.print_table(table)
    output.print(finding.verdict)
