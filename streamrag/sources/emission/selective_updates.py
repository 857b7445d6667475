"""A source that sends an update only when the prefill time it saves is worth the risk of invalidation."""

import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf
from statistics import median

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Source, SourceEvent, Update
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import DEFAULT_BUDGET, StepProfile
from streamrag.errors import ConfigurationError
from streamrag.modes import UpdateMode
from streamrag.sources.emission.best_length import EngineEstimate, HeldContext, best_length, scenarios
from streamrag.sources.emission.calibrate import Place, place, stages_left
from streamrag.sources.emission.calibration import Calibration, Odds, Stage, Times
from streamrag.sources.emission.delayed_updates import HeldUpdates, HoldingSource
from streamrag.support.clock import Clock, monotonic
from streamrag.support.messages import is_number, short_repr
from streamrag.support.validation import Count, NumberOrZero, validated

CHARACTERS_PER_TOKEN = 4  # average of English, with the tokenizers of current models
NUM_HEADING_TOKENS = 20  # tokens around a passage: its number, title and address
LOOKS_PER_STAGE, MIN_WAIT_S = 8, 0.002
"""Number of times that held passages are reconsidered in each stage, and the least seconds between."""
ROUNDING_S = 1e-6
PRICE = 0.1
"""Higher prices made requests wait longer in experiments/emission.py, and saved little more on a busy engine."""


def estimate_tokens(chunk: Chunk) -> int:
    """Estimate the number of tokens of a passage in a prompt from its characters."""
    return len(chunk.text) // CHARACTERS_PER_TOKEN + NUM_HEADING_TOKENS


class SelectiveUpdates(HoldingSource):
    """Sends an update of `source` when that is worth it, and at the latest when retrieval ends.

    A search that refines its result changes it most in its first stages. What is sent too early is computed in vain,
    and final passages may have to wait for it; what is sent too late is computed when it could have been ready. So an
    update is sent when the prefill time that it is expected to save exceeds the expected cost of its invalidation. If
    retrieval leaves no time to prefill all of it later, that is when
    `sum p_i |i [0, d]| > sum (1 - p_i) |i [d, b]| + price * sum (1 - p_i) |i [0, b]|`: p_i is the probability, from
    `calibration`, that the first i passages are final, |i [x, y]| the seconds of prefilling passage i between x and y,
    d the time of the next stage, and b the end of the engine step that runs then. If retrieval leaves that time,
    waiting costs nothing. An update may be sent in part: first the passages that are likely to stay, the others later.

    The final context is the same as without `SelectiveUpdates` in the default mode, `UpdateMode()`: held passages are
    sent when the source ends, fails or is cut short. In another mode, fewer updates may lead to another context. An
    update is sent at once if its hint does not name a stage of `calibration`. An `Append` is sent at once unless an
    update is held back.

    source: the source whose updates are selected; it is started and closed with this one.
    calibration: the result of `calibrate` for `source`, or the path of its file.
    profile: the prefill times: the name or path of a profile, as measured by `streamrag profile`.
    max_num_batched_tokens: the most tokens in a step of the engine.
    others: the number of other concurrent requests, which slow prefilling down, or a function that returns it. None
        counts only the concurrent retrievals of this source.
    price: seconds of waiting that a second of the engine is worth: 0 if it is otherwise idle, 1 or more if it never is.
    whole_only: whether an update is never sent in part.
    count_tokens: a function that returns the tokens of a passage; by default a quarter of its characters, plus 20.

    :raises ConfigurationError: a calibration or profile cannot be read, or an option is invalid.
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
        """Number of running retrievals."""

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, some of them later or never. Closing this closes the source's stream."""
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
        """Return the number of other concurrent requests, as far as it is known; raise if `others` gives no number."""
        if self._others is None:
            return self.num_streams - 1
        if not callable(self._others):
            return self._others
        others = self._others()
        if not is_number(others) or not 0 <= others < inf:
            raise ConfigurationError(f"SelectiveUpdates: others={short_repr(others)} must be a number, at least 0")
        return float(others)

    def _num_tokens(self, chunks: Iterable[Chunk]) -> tuple[int, ...]:
        return tuple(max(self._count_tokens(chunk), 0) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The stage that the source's last event named, or that is presumed because no event came."""

    left: int
    began_s: float


class _WorthwhileUpdates(HeldUpdates):
    """The state of one retrieval: its context, its stage, and the passages that were sent."""

    def __init__(self, owner: SelectiveUpdates) -> None:
        self._owner = owner
        self._engine = EngineEstimate(owner._profile, owner._budget)
        self._began_s = owner._clock()
        self._context: tuple[Chunk, ...] = ()
        self._sent: tuple[Chunk, ...] = ()
        self._owes_update: bool | None = None
        """Whether updates came and none was sent: even one without new passages ranks. None before the first one."""
        self._hint: Hint | None = None
        self._hint_s = 0.0
        self._stage: _Stage | None = None  # None: unknown, and nothing is held back
        self._since: list[tuple[Place, int]] = []
        """The passages in order, each with the first stage since which it and all before it have been the same."""

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
        self._enter_stage(event.hint)
        if self._stage is None or self._stage.left == 0 or (isinstance(event, Append) and not was_held):
            self._send(len(self._context), is_update=was_held or isinstance(event, Update))
            return [Update(self._context, event.hint) if was_held and isinstance(event, Append) else event]
        return self._worthwhile_update()

    def timeout_s(self) -> float | None:
        if self._stage is None or not self._is_held:
            return None
        late_s = self._owner._calibration.stages[self._stage.left].late_s
        until_late_s = self._stage.began_s + late_s - self._now_s()
        return max(min(until_late_s, late_s / LOOKS_PER_STAGE), MIN_WAIT_S)  # long enough for the clock to advance

    def reconsider(self) -> Sequence[Update]:
        """Return the update that is worth sending now. A stage that is late is presumed to have changed nothing."""
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
        hint = self._current_hint()
        self._send(len(self._context))
        return [Update(self._context, hint)]

    @property
    def _is_held(self) -> bool:
        """Whether the newest context was not sent whole, or an update without new passages was not sent."""
        return self._sent != self._context or bool(self._owes_update)

    def _now_s(self) -> float:
        return self._owner._clock() - self._began_s

    def _enter_stage(self, hint: Hint | None) -> None:
        """Set the stage that this hint names, and update since when passages have been the same."""
        left = stages_left(hint)
        if left is None or left >= self._owner._odds.num_stages:
            self._stage, self._since = None, []
            return
        self._stage = _Stage(left, self._now_s())
        places = [place(chunk) for chunk in self._context]
        num_same = _num_same(places, [known for known, _ in self._since])
        self._since = [*self._since[:num_same], *((each, left) for each in places[num_same:])]

    def _worthwhile_update(self) -> Sequence[Update]:
        """Return the update that is worth sending now, or nothing. A returned update counts as sent."""
        assert self._stage is not None
        owner, left = self._owner, self._stage.left
        self._engine.advance(self._now_s())
        p_final = owner._odds.prefixes(left, [since - left for _, since in self._since])
        held = HeldContext(
            num_kept=_num_same(map(place, self._sent), map(place, self._context)),
            tokens=owner._num_tokens(self._context),
            others=owner.num_others(),
            price=owner._price,
            scenarios=scenarios(*self._times(owner._calibration.stages[left]), p_final),
        )
        length = best_length(held, self._engine, whole_only=owner._whole_only)
        if length is None:
            return ()
        hint = self._current_hint()
        self._send(length)
        return [Update(self._context[:length], hint)]

    def _times(self, stage: Stage) -> "tuple[list[tuple[float, float]], list[tuple[float, float]]]":
        """Return seconds until the next stage and until the end, if the result is final and if it is not."""
        assert self._stage is not None
        elapsed_s = self._now_s() - self._stage.began_s
        end_s = self._hint.end_s if self._hint is not None else None
        left_s = self._hinted_end_s()

        def remaining(examples: Sequence[Times]) -> list[tuple[float, float]]:
            if end_s is None or left_s is None or not 0 <= end_s < inf:
                return [_after(each, elapsed_s) for each in examples if each.end_s > elapsed_s or not elapsed_s]
            return [(min(_after(each, elapsed_s)[0], left_s), left_s) for each in examples]  # the source knows better

        return remaining(stage.when_final), remaining(stage.when_not)

    def _hinted_end_s(self) -> float | None:
        """Return the seconds until the end that the last hint expects, counted from now."""
        end_s = self._hint.end_s if self._hint is not None else None
        return None if end_s is None else max(end_s - (self._now_s() - self._hint_s), 0.0)

    def _current_hint(self) -> Hint | None:
        """Return the last hint, adjusted to the present time and stage."""
        if self._hint is None or self._stage is None:
            return self._hint
        return replace(self._hint, num_chunks=self._stage.left, end_s=self._hinted_end_s())

    def _send(self, length: int, *, is_update: bool = True) -> None:
        """Record that the engine gets the first `length` passages of the context."""
        if is_update:
            self._owes_update = False
        new = self._context[:length]
        tokens = self._owner._num_tokens(new)
        num_kept = _num_same(map(place, self._sent), map(place, new))
        self._engine.send(sum(tokens[:num_kept]), sum(tokens), self._now_s())
        self._sent = new


def _typical_s(stage: Stage) -> float:
    """Return the median seconds to the next stage; 0 without examples."""
    times = (*stage.when_final, *stage.when_not)
    return median(each.next_s for each in times) if times else 0.0


def _after(times: Times, elapsed_s: float) -> tuple[float, float]:
    """Return the remaining times after `elapsed_s`. If the next stage is over, another one may come as late again."""
    next_s = times.next_s - elapsed_s if elapsed_s < times.next_s else times.next_s
    end_s = max(times.end_s - elapsed_s, 0.0)
    return min(next_s, end_s), end_s


def _num_same(places: Iterable[Place], others: Iterable[Place]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(places, others, strict=False)))
