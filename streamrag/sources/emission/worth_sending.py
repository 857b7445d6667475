"""A source whose updates are sent when they are worth it."""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Source, SourceEvent, Update
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import DEFAULT_BUDGET, StepProfile
from streamrag.errors import ConfigurationError
from streamrag.modes import UpdateMode
from streamrag.sources.emission.best_length import EngineGuess, Held, best_length, futures
from streamrag.sources.emission.calibrate import Place, place, stages_left
from streamrag.sources.emission.calibration import Calibration, Odds, Stage, Times
from streamrag.sources.emission.held_updates import HoldingSource
from streamrag.support.clock import Clock, monotonic
from streamrag.support.messages import is_number, short
from streamrag.support.validation import Count, NumberOrZero, validated

CHARACTERS_PER_TOKEN = 4
"""Average of English, with the tokenizers of current models."""
NUM_HEADING_TOKENS = 20
"""Tokens around a passage: its number, title and address."""
NUM_LOOKS, MIN_WAIT_S = 8, 0.002
"""Times in each stage that held passages are reconsidered, and the least seconds between."""
ROUNDING_S = 1e-6
PRICE = 0.1
"""Higher ones made requests wait longer in experiments/emission.py, and saved little more on a busy engine."""


def estimate_tokens(chunk: Chunk) -> int:
    """Return about how many tokens a passage has in a prompt."""
    return len(chunk.text) // CHARACTERS_PER_TOKEN + NUM_HEADING_TOKENS


class WorthSending(HoldingSource):
    """Passes on an update of `source` when that is worth it, and at the latest when retrieval ends.

    A search that refines its result changes it most while little is known. What is sent too early is computed in vain,
    and what is final may have to wait behind it; what is sent too late is computed when it could have been there. So an
    update is sent when the prefill time that it is expected to save is more than what its invalidation is expected to
    cost. In short, where retrieval leaves no time to prefill all of it later, when
    `sum p_i |i [0, d]| > sum (1 - p_i) |i [d, b]| + price * sum (1 - p_i) |i [0, b]|`: p_i is the probability, from
    `calibration`, that the first i passages are final, |i [x, y]| the seconds of prefilling passage i between x and y,
    d when the next stage comes, and b when the engine's step ends that runs then.
    Where retrieval leaves that time, waiting costs nothing, and it waits. An update may be sent in part: the passages
    that are likely to stand now, the others later.

    The final context is the same as without it, in the mode `UpdateMode()`, which is the default: what is held back
    comes when the source ends, fails or is cut short. Another mode may make another context of fewer updates. An update
    is passed on at once when its hint does not tell at which stage it is, or one that `calibration` does not have; and
    so is an `Append`, unless something is held back, of which it then is a part.

    calibration: what `calibrate` found out about `source`, or the path of its file.
    profile: what prefilling takes: the name or path of a profile, as `streamrag profile` measures it.
    max_num_batched_tokens: the most tokens in a step of the engine.
    others: how many requests of others there are at the same time, which make prefilling take longer; or a function
        that is called for it. None counts what a source can know, its own retrievals that run at the same time.
    price: what a second of the engine's time is worth, in seconds of waiting: 0 where it has nothing else to do, 1 or
        more where it is never idle.
    whole_only: never send a part of an update.
    count_tokens: tokens of a passage in a prompt; by default a quarter of its characters, and some for its heading.

    :raises ConfigurationError: a calibration or a profile that cannot be read, or values that cannot work.
    """

    @validated
    def __init__(
        self,
        source: Source,
        calibration: "Calibration | str | os.PathLike[str]",
        profile: StepProfile | str,
        *,
        max_num_batched_tokens: Count = DEFAULT_BUDGET,
        others: NumberOrZero | Callable[[], float] | None = None,
        price: NumberOrZero = PRICE,
        whole_only: bool = False,
        count_tokens: Callable[[Chunk], int] = estimate_tokens,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(source)
        self._calibration = calibration if isinstance(calibration, Calibration) else Calibration.read(calibration)
        self._odds = Odds(self._calibration)
        self._profile = load_profile(profile) if isinstance(profile, str) else profile
        self._budget = max_num_batched_tokens
        self._others = others
        self._price = price
        self._whole_only = whole_only
        self._count_tokens = count_tokens
        self._clock = clock
        self.num_streams = 0
        """Retrievals that run now."""

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, some of them later or never; close it if it is not read to its end."""
        self.num_streams += 1
        try:
            async with aclosing(super().stream(query)) as events:
                async for event in events:
                    yield event
        finally:
            self.num_streams -= 1

    def _new_updates(self) -> "_WorthwhileUpdates":
        return _WorthwhileUpdates(self)

    def num_others(self) -> float:
        """Return the number of other requests at the same time, as far as is known."""
        if self._others is None:
            return self.num_streams - 1
        if not callable(self._others):
            return self._others
        others = self._others()
        if not is_number(others) or not 0 <= others < inf:
            raise ConfigurationError(f"WorthSending: others={short(others)} must be a number, at least 0")
        return float(others)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The stage of the source that its last event named, or that its silence lets presume."""

    left: int
    began_s: float


class _WorthwhileUpdates:
    """The events of one retrieval, and the passages that were sent."""

    def __init__(self, owner: WorthSending) -> None:
        self._owner = owner
        self._guess = EngineGuess(owner._profile, owner._budget)
        self._began_s = owner._clock()
        self._context: tuple[Chunk, ...] = ()
        self._sent: tuple[Chunk, ...] = ()
        self._owes_update: bool | None = None
        """Whether an update came and none was sent: one with nothing new still ranks. None before any came."""
        self._hint: Hint | None = None
        self._hint_s = 0.0
        self._stage: _Stage | None = None  # None: not known, and nothing is held back
        self._since: list[tuple[Place, int]] = []
        """The passages in order, each with the stage since which it and all before it have been the same."""

    # ------------------------------------------------------------------------------------------------- the events

    def take(self, event: SourceEvent) -> Sequence[SourceEvent]:
        if isinstance(event, Skipped):
            return [event]
        if isinstance(event, CutShort):
            rest = self.rest()
            self._stage = None
            return [*rest, event]
        was_held = self._is_held
        self._context = UpdateMode().fold(self._context, event)
        if isinstance(event, Update) and self._owes_update is None:
            self._owes_update = True
        self._hint, self._hint_s = event.hint, self._now_s()
        self._note_stage(event.hint)
        if self._stage is None or self._stage.left == 0 or (isinstance(event, Append) and not was_held):
            self._send(len(self._context), is_update=was_held or isinstance(event, Update))
            return [Update(self._context, event.hint) if was_held and isinstance(event, Append) else event]
        return self._worthwhile_update()

    def timeout_s(self) -> float | None:
        if self._stage is None or not self._is_held:
            return None
        late_s = self._owner._calibration.stages[self._stage.left].late_s
        until_late_s = self._stage.began_s + late_s - self._now_s()
        return max(min(until_late_s, late_s / NUM_LOOKS), MIN_WAIT_S)  # never so little that no time passes

    def reconsider(self) -> Sequence[Update]:
        """Take it that a stage that is late has changed nothing."""
        assert self._stage is not None
        left, began_s = self._stage.left, self._stage.began_s
        stage = self._owner._calibration.stages[left]
        if self._now_s() >= began_s + stage.late_s - ROUNDING_S:
            if left <= 1:
                self._stage = _Stage(0, self._now_s())
                return self.rest()
            self._stage = _Stage(left - 1, began_s + min(_typical_s(stage), stage.late_s))
        return self._worthwhile_update()

    def rest(self) -> Sequence[Update]:
        if not self._is_held:
            return ()
        hint = self._hint_now()
        self._send(len(self._context))
        return [Update(self._context, hint)]

    # ---------------------------------------------------------------------------------------------------- the rule

    @property
    def _is_held(self) -> bool:
        return self._sent != self._context or bool(self._owes_update)

    def _now_s(self) -> float:
        return self._owner._clock() - self._began_s

    def _note_stage(self, hint: Hint | None) -> None:
        """Note the stage that this hint names, and since when passages have been the same."""
        left = stages_left(hint)
        if left is None or left >= self._owner._odds.num_stages:
            self._stage, self._since = None, []
            return
        self._stage = _Stage(left, self._now_s())
        places = [place(chunk) for chunk in self._context]
        num_same = _num_same(places, [known for known, _ in self._since])
        self._since = [*self._since[:num_same], *((each, left) for each in places[num_same:])]

    def _worthwhile_update(self) -> Sequence[Update]:
        assert self._stage is not None
        owner, left, now_s = self._owner, self._stage.left, self._now_s()
        self._guess.pass_until(now_s)
        p_final = owner._odds.prefixes(left, [since - left for _, since in self._since])
        held = Held(
            num_kept=_num_same([*map(place, self._sent)], [*map(place, self._context)]),
            tokens=tuple(max(owner._count_tokens(chunk), 0) for chunk in self._context),
            others=owner.num_others(),
            price=owner._price,
            futures=futures(*self._times(owner._calibration.stages[left]), p_final),
        )
        length = best_length(held, self._guess, whole_only=owner._whole_only)
        if length is None:
            return ()
        hint = self._hint_now()
        self._send(length)
        return [Update(self._context[:length], hint)]

    def _times(self, stage: Stage) -> "tuple[list[tuple[float, float]], list[tuple[float, float]]]":
        """Return seconds until the next stage and until the end, if the result is final and if it is not."""
        assert self._stage is not None
        passed_s = self._now_s() - self._stage.began_s
        final, others = (
            [_after(each, passed_s) for each in times if each.end_s > passed_s or not passed_s]
            for times in (stage.when_final, stage.when_not)
        )
        end_s = self._hint.end_s if self._hint is not None else None
        if end_s is None or not 0 <= end_s < inf:
            return final, others
        left_s = max(end_s - (self._now_s() - self._hint_s), 0.0)  # the source knows better
        final, others = (
            [(min(_after(each, passed_s)[0], left_s), left_s) for each in times]
            for times in (stage.when_final, stage.when_not)
        )
        return final, others

    def _hint_now(self) -> Hint | None:
        """Return the last hint, as it reads now."""
        if self._hint is None or self._stage is None:
            return self._hint
        end_s = self._hint.end_s
        if end_s is not None:
            end_s = max(end_s - (self._now_s() - self._hint_s), 0.0)
        return replace(self._hint, num_chunks=self._stage.left, end_s=end_s)

    def _send(self, length: int, *, is_update: bool = True) -> None:
        """Note that the engine has the first `length` passages of the context from now on."""
        if is_update:
            self._owes_update = False
        new = self._context[:length]
        tokens = [max(self._owner._count_tokens(chunk), 0) for chunk in new]
        num_kept = _num_same([*map(place, self._sent)], [*map(place, new)])
        self._guess.sent(sum(tokens[:num_kept]), sum(tokens), self._now_s())
        self._sent = new


def _typical_s(stage: Stage) -> float:
    return (
        median(each.next_s for each in (*stage.when_final, *stage.when_not))
        if stage.when_final or stage.when_not
        else 0.0
    )


def _after(times: Times, passed_s: float) -> tuple[float, float]:
    """Return the times that are left after `passed_s` seconds. Where the next stage has passed, another may come."""
    next_s = times.next_s - passed_s if passed_s < times.next_s else times.next_s
    end_s = max(times.end_s - passed_s, 0.0)
    return min(next_s, end_s), end_s


def _num_same(places: list[Place], others: list[Place]) -> int:
    """Return the number of leading places that are the same."""
    for number, (a, b) in enumerate(zip(places, others, strict=False)):
        if a != b:
            return number
    return min(len(places), len(others))
