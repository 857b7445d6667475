"""What is rare in serving, added to a load: pauses, new weights, broken host memory, clients that misbehave.

Each situation takes a load and returns it with more in it. Most loads get a few, some none; which ones is drawn apart
from the load, so that the load of a seed stays what it is when a situation is added here.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from tests.engine.oracle import fingerprint, next_token

from .events import Abort, Chunk, EndOfInput, Event, Evict, Grammar, Lost, Malformed, Pause, Plain, Reset, Resume
from .scenarios import Scenario, make_load

__all__ = ["GARBAGE", "SITUATIONS", "last_event_s", "make_scenario", "streams_of"]

Situation: TypeAlias = Callable[[random.Random, Scenario], Scenario]
Timed: TypeAlias = tuple[float, Event]

FIELDS: dict[str, Any] = {"index": 0, "num_kept": 0, "is_complete": True}
"""What a chunk must say at least."""
GARBAGE: tuple[Any, ...] = (
    *(5, 0, 1.5, True, False, "", "chunk", [], [1], [[]]),
    *({}, {"index": 0}, {**FIELDS, "more": 1}, {**FIELDS, 1: 2}, {"is_end": False}, {**FIELDS, "is_end": True}),
    *({**FIELDS, "index": index} for index in ("0", None, -1, 0.5, True, [0])),
    *({**FIELDS, "num_kept": num} for num in ("0", None, -1, 0.5, 3, 2**62, {})),
    *({**FIELDS, "is_complete": is_complete} for is_complete in ("yes", None, 1, [])),
    *({**FIELDS, "arrival_s": at_s} for at_s in ("now", math.nan, math.inf, -1.0, True, [], {})),
    *({**FIELDS, "expected_complete_s": at_s} for at_s in ("soon", math.nan, [])),
    *({**FIELDS, "source_name": source} for source in (5, None, [], {"a": 1}, 2_000 * "a")),
    *({**FIELDS, "request_class": name} for name in (5, None, [], {}, "first")),
)
"""What a client of another program may put in the place of a chunk message."""


def make_scenario(seed: int) -> Scenario:
    """The load of that seed, with its situations."""
    rng = random.Random(-3 * seed - 7)
    names = rng.sample(sorted(SITUATIONS), rng.choice([0, 1, 1, 2, 2, 4]))
    names.sort(key=lambda name: name != "reused ids")  # copies requests as they are, to which the others add
    scenario = make_load(seed)
    twins = random.Random(-11 * seed - 23)  # drawn apart too: the situations of a seed stay what they were
    if twins.random() < 0.5:
        scenario = _twins(twins, scenario)
    for name in names:
        scenario = SITUATIONS[name](rng, scenario)
    if seed % 8 == 6:
        scenario = _copies(random.Random(-19 * seed - 37), scenario)
    if seed % 4 == 2:
        scenario = _drafts(random.Random(-17 * seed - 31), scenario)
    scenario = _mamba(random.Random(-17 * seed - 41), scenario)  # last: it fits few of the situations
    events = tuple(sorted(scenario.events, key=lambda e: e[0]))
    return replace(scenario, situations=tuple(names), events=events)


def _mamba(rng: random.Random, scenario: Scenario) -> Scenario:
    """Half of the layers become Mamba layers, in half of the loads in which there is one kind of blocks."""
    is_other = scenario.eviction != "recompute" or scenario.sliding_window is not None or scenario.num_draft_tokens
    if is_other or rng.random() < 0.5:
        return scenario
    return replace(
        scenario,
        has_mamba=True,
        num_blocks=2 * scenario.num_blocks + 3,
        max_num_batched_tokens=max(scenario.max_num_batched_tokens, scenario.block_size),
    )


def _twins(rng: random.Random, scenario: Scenario) -> Scenario:
    """Streams that send what others send, a little earlier or later and in other pieces, and an end of their own."""
    events = list(scenario.events)
    for name, chunks in streams_of(scenario):
        for number in range(rng.choice([1, 1, 2])):
            delay_s, keeps_pace = rng.choice([-1.0, 0.0, 0.3, 2.0, 8.0]), rng.random() < 0.5
            own = tuple(rng.randrange(4) for _ in range(rng.randrange(8)))
            sent = [timed for timed in chunks[:-1] if rng.random() < 0.7] + chunks[-1:]
            for index, (at_s, chunk) in enumerate(sent):
                is_last = index == len(sent) - 1
                prompt = (chunk.prompt + own)[: scenario.max_model_len - 1] if is_last else chunk.prompt
                twin = replace(chunk, request_id=f"{name}twin{number}", index=index, prompt=prompt, num_kept=0)
                pause_s = 0.0 if keeps_pace else rng.expovariate(1.0)
                events.append((max(at_s + delay_s, 0.0) + pause_s, twin))
    events += [
        (rng.uniform(0, last_event_s(scenario) + 5), Evict(rng.randrange(100))) for _ in range(rng.choice([0, 2, 8]))
    ]
    return replace(scenario, events=_in_order(events))


def _drafts(rng: random.Random, scenario: Scenario) -> Scenario:
    """Clients come with drafts of their answers, good and bad, and have some made while their prompts still change."""
    events: list[Timed] = []
    classes = dict(scenario.request_classes)
    earlier: dict[str, tuple[int, ...]] = {}  # the last prompt of each stream
    for at_s, event in scenario.events:
        if not isinstance(event, Chunk):
            events.append((at_s, event))
            continue
        old, earlier[event.request_id] = earlier.get(event.request_id, ()), event.prompt
        if event.is_complete and rng.random() < (0.8 if "prompt_lookup" not in scenario.options else 0.3):
            event = replace(event, draft=_draft(rng, event, old, scenario.vocabulary))
        events.append((at_s, event))
        if not event.is_complete and rng.random() < 0.4:
            name, tail = f"{event.request_id}draft{event.index}", tuple(rng.randrange(4) for _ in range(3))
            prompt = (event.prompt + tail)[: scenario.max_model_len - 1]
            guess = replace(
                event, request_id=name, index=0, prompt=prompt, num_kept=0, is_complete=True, has_grammar=False
            )
            draft = _draft(rng, guess, old, scenario.vocabulary) if rng.random() < 0.5 else ()
            events.append((at_s, replace(guess, draft=draft)))
            classes[name] = "draft"
            if rng.random() < 0.6:
                events.append((at_s + rng.choice([0.5, 3.0, 8.0]), Abort(name, is_in_mid_step=rng.random() < 0.5)))
    return replace(
        scenario,
        events=tuple(events),
        request_classes=classes,
        num_draft_tokens=rng.choice([1, 3, 8, 30]),
        is_async=False,
        has_v2_runner=False,
    )


def _copies(rng: random.Random, scenario: Scenario) -> Scenario:
    """The model knows few tokens, so that long answers come across what stands in their prompts, and copy it."""
    events = [
        (at_s, replace(e, max_tokens=e.max_tokens * rng.choice([1, 2, 5])) if isinstance(e, Chunk | Plain) else e)
        for at_s, e in scenario.events
    ]
    options = {**scenario.options, "prompt_lookup": rng.random() < 0.8}
    return replace(scenario, events=tuple(events), vocabulary=rng.choice([2, 2, 3]), options=options)


def _draft(rng: random.Random, chunk: Chunk, old: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The answer, or what differs from it at the start, in the middle or at the end, or that to another prompt."""
    right = _answer(chunk.prompt, chunk.max_tokens, vocabulary)
    place = rng.randrange(len(right))
    wrong = (right[place] + 1) % vocabulary
    match rng.choice(["right", "first", "changed", "inserted", "removed", "short", "long", "old", "any"]):
        case "first":
            return ((right[0] + 1) % vocabulary, *right[1:])
        case "changed":
            return (*right[:place], wrong, *right[place + 1 :])
        case "inserted":
            return (*right[:place], wrong, *right[place:])
        case "removed":
            return right[:place] + right[place + 1 :]
        case "short":
            return right[:place]
        case "long":
            return _answer(chunk.prompt, chunk.max_tokens + 20, vocabulary)
        case "old":
            return _answer(old, chunk.max_tokens, vocabulary)
        case "any":
            return tuple(rng.randrange(vocabulary) for _ in range(place + 1))
    return right


def _answer(prompt: tuple[int, ...], num_tokens: int, vocabulary: int) -> tuple[int, ...]:
    """The answer to a prompt, up to `num_tokens`."""
    prefix, answer = 0, []
    for token in prompt:
        prefix = fingerprint(prefix, token)
    for _ in range(num_tokens):
        answer.append(next_token(prefix, vocabulary))
        prefix = fingerprint(prefix, answer[-1])
    return tuple(answer)


def _in_order(events: list[Timed]) -> tuple[Timed, ...]:
    """By time, the chunks of a stream by their index."""
    ready_s: dict[str, float] = {}
    ordered: list[Timed] = []
    chunks = [(event.index, at_s, event) for at_s, event in events if isinstance(event, Chunk)]
    for _, at_s, chunk in sorted(chunks, key=lambda each: each[:2]):
        ready_s[chunk.request_id] = max(at_s, ready_s.get(chunk.request_id, 0.0))
        ordered.append((ready_s[chunk.request_id], chunk))
    ordered += [timed for timed in events if not isinstance(timed[1], Chunk)]
    return tuple(sorted(ordered, key=lambda timed: timed[0]))


def _ends(rng: random.Random, scenario: Scenario) -> Scenario:
    """Streams end their input, some without a last chunk."""
    events = list(scenario.events)
    for name, chunks in streams_of(scenario):
        last_s, last = chunks[-1]
        if len(chunks) > 1 and last.is_complete and rng.random() < 0.4:
            events.remove((last_s, last))
            last_s = rng.choice([chunks[-2][0], last_s])
        events.append((last_s + rng.choice([0.0, 0.0, 1.0, 4.0]), EndOfInput(name)))
    return replace(scenario, events=tuple(events))


def _pauses(rng: random.Random, scenario: Scenario) -> Scenario:
    """The operator pauses the engine; its clients go on as they were, and some go away in the meantime."""
    events = list(scenario.events)
    last_s = last_event_s(scenario)
    times = sorted(rng.uniform(0, last_s + 5) for _ in range(2 * rng.choice([1, 1, 2, 3])))
    for from_s, until_s in zip(times[::2], times[1::2], strict=True):
        mode = rng.choice(["abort", "abort", "wait", "keep", "keep"])
        events += [(from_s, Pause(mode, rng.random() < 0.4)), (until_s, Resume())]
        for name in rng.sample(_names(scenario), min(2, len(_names(scenario)))):
            events.append((rng.uniform(from_s, until_s), Abort(name)))
    return replace(scenario, events=tuple(events))


def _weights(rng: random.Random, scenario: Scenario) -> Scenario:
    """New weights are loaded while requests run."""
    last_s = last_event_s(scenario)
    resets = [Reset(rng.random() < 0.8, rng.random() < 0.3) for _ in range(rng.choice([1, 2, 4]))]
    return _with_swap(rng, scenario, [(rng.uniform(0, last_s + 5), reset) for reset in resets], share=0.6)


def _grammars(rng: random.Random, scenario: Scenario) -> Scenario:
    """Some complete prompts wait for a grammar, in every third load of streams too, beside others that keep it busy."""
    events: list[Timed] = []
    of_chunks = random.Random(scenario.seed)  # of its own: what else happens is as it was without grammars of streams
    for at_s, event in scenario.events:
        is_last = isinstance(event, Plain) or (isinstance(event, Chunk) and event.is_complete)
        dice = rng if isinstance(event, Plain) else of_chunks
        may_wait = isinstance(event, Plain) or (isinstance(event, Chunk) and scenario.seed % 3 == 0)
        if may_wait and dice.random() < 0.5:
            events.append((at_s, replace(event, has_grammar=True)))
            if is_last:
                events.append((at_s + dice.choice([0.0, 1.0, 5.0]), Grammar(event.request_id, dice.random() < 0.9)))
        else:
            events.append((at_s, event))
    start_s = rng.uniform(0, last_event_s(scenario))
    for number in range(rng.choice([5, 10, 20])):
        name, has_grammar = f"p{1_000 + number}", number == 2 or rng.random() < 0.1
        prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(1, scenario.max_model_len // 2)))
        at_s = start_s + number * rng.choice([0.5, 1.0, 2.0])
        events.append((at_s, Plain(name, prompt, rng.randrange(1, 12), None, has_grammar)))
        if has_grammar:
            events.append((at_s + rng.choice([0.5, 3.0]), Grammar(name, rng.random() < 0.9)))
    policy = scenario.policy if rng.random() < 0.4 else rng.choice(["fcfs", "arrival"])
    return replace(scenario, events=tuple(events), policy=policy)


def _bad_slots(rng: random.Random, scenario: Scenario) -> Scenario:
    """Some host slots can never be read, or never be written; and who loads may be evicted before that is known."""
    scenario = _with_swap(rng, scenario)
    slots = range(scenario.num_host_blocks)
    bad_loads, bad_saves = (frozenset(s for s in slots if rng.random() < rng.choice([0, 0.2, 0.4])) for _ in range(2))
    return replace(
        scenario,
        bad_loads=bad_loads,
        bad_saves=bad_saves,
        share_of_evicted_loaders=rng.choice([0.0, 0.3, 1.0]),
        is_async=scenario.is_async or rng.random() < 0.5,
        eviction=rng.choice([scenario.eviction, "cost"]),
        num_blocks=rng.choice([scenario.num_blocks, int(1.3 * scenario.max_model_len / scenario.block_size)]),
    )


def _small_host(rng: random.Random, scenario: Scenario) -> Scenario:
    """There is less host memory than was promised, which is only told with the first copies."""
    num = rng.choice([0, 1, scenario.num_host_blocks // 2, scenario.num_host_blocks - 1])
    return replace(_with_swap(rng, scenario), num_true_host_blocks=num)


def _reused_ids(rng: random.Random, scenario: Scenario) -> Scenario:
    """Ids are used again: by clients that number their requests anew, and by those that go away and ask once more."""
    names = _names(scenario)
    reused = {name: rng.choice(names[:i]) for i, name in enumerate(names) if i and rng.random() < 0.4}
    events = list(scenario.events)
    for old in names:
        if rng.random() < 0.5:
            new = f"{old}again"
            reused[new] = old
            asked = [(at_s, e) for at_s, e in events if isinstance(e, Plain | Chunk) and e.request_id == old]
            left_s = asked[0][0] + rng.choice([1.0, 3.0, 10.0])
            delay_s = left_s - asked[0][0] + rng.choice([0.0, 1.0, 2.0])
            events += [(left_s - rng.choice([0.0, 0.5]), Evict(rng.randrange(100))), (left_s, Abort(old))]
            events += [(at_s + delay_s, replace(event, request_id=new)) for at_s, event in asked]
    return _with_swap(rng, replace(scenario, events=tuple(events), reused_ids=reused), share=0.8)


def _malformed(rng: random.Random, scenario: Scenario) -> Scenario:
    """Nonsense in the place of messages, from clients of their own and within streams."""
    last_s = last_event_s(scenario)
    events = list(scenario.events)
    for number in range(rng.randrange(1, 5)):
        prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(1, 20)))
        events.append((rng.uniform(0, last_s), Malformed(f"m{number}", rng.choice(GARBAGE), prompt)))
    for name, chunks in streams_of(scenario):
        if len(chunks) > 1 and rng.random() < 0.3:
            # Just before one of its chunks, to which it would fit but for its nonsense.
            number = rng.randrange(1, len(chunks))
            at_s, chunk = chunks[number]
            message = {**FIELDS, "index": chunk.index, "is_complete": chunk.is_complete}
            too_much = {**message, "num_kept": len(chunks[number - 1][1].prompt) + 1}
            nonsense = rng.choice([rng.choice(GARBAGE), too_much, {**message, "index": chunk.index + 1}])
            events.insert(events.index((at_s, chunk)), (at_s, Malformed(name, nonsense, chunk.prompt[:1])))
    return replace(scenario, events=tuple(events))


def _gaps(rng: random.Random, scenario: Scenario) -> Scenario:
    """A chunk that is not the last never arrives, as if its client had been cancelled while it sent it."""
    events = list(scenario.events)
    for name, chunks in streams_of(scenario):
        # Without its first chunk, a stream cannot be told from an earlier one of its id.
        losable = chunks[name in scenario.reused_ids : -1]
        if losable and rng.random() < 0.4:
            timed = rng.choice(losable)
            events[events.index(timed)] = (timed[0], Lost(timed[1]))
    return replace(scenario, events=tuple(events))


def _goers(rng: random.Random, scenario: Scenario) -> Scenario:
    """Clients go away while a step computes."""
    last_s = last_event_s(scenario)
    gone = [name for name in _names(scenario) if rng.random() < 0.4]
    aborts: list[Timed] = [(rng.uniform(0, last_s + 5), Abort(name, is_in_mid_step=True)) for name in gone]
    return replace(scenario, events=(*scenario.events, *aborts))


SITUATIONS: dict[str, Situation] = {
    "bad slots": _bad_slots,
    "ends": _ends,
    "gaps": _gaps,
    "goers": _goers,
    "grammars": _grammars,
    "malformed": _malformed,
    "pauses": _pauses,
    "reused ids": _reused_ids,
    "small host": _small_host,
    "weights": _weights,
}


def _with_swap(
    rng: random.Random, scenario: Scenario, more: list[Timed] | None = None, *, share: float = 1.0
) -> Scenario:
    """`share` of such loads swap what is evicted, and something is."""
    events = [*scenario.events, *(more or [])]
    if scenario.eviction == "recompute" and rng.random() < share:
        last_s = last_event_s(scenario)
        events += [(rng.uniform(0, last_s + 5), Evict(rng.randrange(100))) for _ in range(rng.choice([10, 40]))]
        scenario = replace(scenario, eviction="swap", has_prefix_cache=True, sliding_window=None)
    return replace(scenario, events=tuple(events))


def last_event_s(scenario: Scenario) -> float:
    return max(at_s for at_s, _ in scenario.events)


def _names(scenario: Scenario) -> list[str]:
    """Names of all requests, in the order in which they come."""
    return list(dict.fromkeys(e.request_id for _, e in scenario.events if isinstance(e, Plain | Chunk)))


def streams_of(scenario: Scenario) -> Iterator[tuple[str, list[tuple[float, Chunk]]]]:
    """The chunks of each stream, as far as nothing else was made of them."""
    chunks: dict[str, list[tuple[float, Chunk]]] = {}
    for at_s, event in scenario.events:
        if isinstance(event, Chunk):
            chunks.setdefault(event.request_id, []).append((at_s, event))
    yield from chunks.items()
