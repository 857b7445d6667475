"""The verdict on a comparison in words: what is faster, what was retrieved when, what limits the gain, what to do."""

import math
import statistics
from collections.abc import Iterator, Sequence

from streamrag.telemetry import ChunkArrived, Timings
from streamrag_bench.compare.interval import Interval
from streamrag_bench.compare.pairs import FIRST_TOKEN, ComparedGroup

HEADLINES = {
    "faster": "streaming is faster here",
    "slower": "streaming is slower here; Pipeline(overlap=False) does without it",
    "the same": "streaming makes no difference here",
    "unclear": "it is unclear whether streaming is faster here",
}
AT_ONCE_S = 0.05  # a first result that comes so shortly before the end of retrieval is of no use
BUSY_SHARE = 0.05  # of the cores: from here on, other programs are named as a cause of noise
LONGER, CHANGED = 1.05, 0.1  # factor of retrieval's duration, and share of a prompt, that are named as costs


def verdict(group: ComparedGroup) -> Iterator[str]:
    """Yield the verdict on a group that has pairs, one sentence or two each: gain, retrieval, limits, answers."""
    question, retrieval = (group.interval(name) for name in FIRST_TOKEN)
    last = group.interval("last token, from the question")
    yield (
        f"Verdict, {group.name}: {HEADLINES[question.word]}. The first token comes "
        f"{phrase(question)} after the question, and {phrase(retrieval)} after retrieval. The last token comes "
        f"{phrase(last)} after the question."
    )
    yield _retrieval(group)
    yield from limits(group)
    yield _answers(group)


def phrase(found: Interval) -> str:
    """Return how much sooner something comes, with its interval."""
    low, middle, high = found
    match found.word:
        case "faster":
            return f"{middle:.2f} times as soon ({low:.2f} to {high:.2f})"
        case "slower":
            return f"{1 / middle:.2f} times as late ({1 / high:.2f} to {1 / low:.2f})"
        case "the same":
            return f"at the same time ({low:.2f} to {high:.2f} times as soon)"
    if math.isinf(high):
        return f"{middle:.2f} times as soon in the only pair"
    return f"perhaps sooner and perhaps later ({low:.2f} to {high:.2f} times as soon)"


def _retrieval(group: ComparedGroup) -> str:
    """Return what was retrieved when, in medians of the pairs without streaming."""
    answers = [pair.answers[1] for pair in group.pairs]
    end_s = statistics.median(answer.timings.retrieval_s for answer in answers)
    times = [[event.at_s for event in pair.waiting if isinstance(event, ChunkArrived)] for pair in group.pairs]
    found = [each for each in times if each]
    if not found:
        return f"Retrieval found nothing, and ended after {end_s:.2f} s (median)."
    first_s, last_s = (statistics.median(end(each) for each in found) for end in (min, max))
    num = statistics.median(map(len, found))
    return (
        f"Retrieval (medians): the first of {num:.0f} results came {first_s:.2f} s after the question, the last "
        f"after {last_s:.2f} s, and the end after {end_s:.2f} s."
    )


def limits(group: ComparedGroup) -> Iterator[str]:
    """Yield what limits the gain, and what costs it."""
    pairs = [pair.answers for pair in group.pairs]
    prefill_s = statistics.median(waiting.timings.ttft_after_retrieval_s for _, waiting in pairs)
    overlap_s = statistics.median(_overlap_s(waiting.timings) for _, waiting in pairs)
    if overlap_s <= AT_ONCE_S:
        yield (
            f"Limit: retrieval ends {overlap_s:.2f} s after its first result, so that only the text before the "
            "context can be prefilled meanwhile. A source that returns results in stages helps."
        )
    elif overlap_s < prefill_s:
        yield (
            f"Limit: retrieval goes on for {overlap_s:.2f} s after its first result. No more of the "
            f"{prefill_s:.2f} s to the first token can be gained, but for the prefill of the text before the context."
        )
    else:
        yield f"Limit: no more than the {prefill_s:.2f} s after retrieval that the first token takes without streaming."
    streaming_s, waiting_s = group.medians(lambda timings: timings.retrieval_s)
    if streaming_s > LONGER * waiting_s:
        yield (
            f"Cost: retrieval takes {streaming_s - waiting_s:.2f} s longer with streaming, probably because it "
            "shares its processors with the model. Another machine for either helps."
        )
    share = statistics.median(streaming.num_invalidated / streaming.num_prompt_tokens for streaming, _ in pairs)
    if share > CHANGED:
        yield (
            f"Cost: later results replaced {share:.0%} of a prompt (median), which was prefilled in vain. AppendMode() "
            'avoids it; overlap="auto", the default, learns whether it pays.'
        )


def _overlap_s(timings: Timings) -> float:
    """Return the seconds from the first result to the end of retrieval; 0 without a result."""
    return 0.0 if timings.first_chunk_s is None else timings.retrieval_s - timings.first_chunk_s


def _answers(group: ComparedGroup) -> str:
    """Return how many pairs had the same context and the same answer."""
    same = [pair for pair in group.pairs if pair.has_same_context]
    num_equal = sum(pair.has_same_answer for pair in same)
    text = (
        f"Answers: the context was the same both ways in {len(same)} of {len(group.pairs)} pairs, and the answer in "
        f"{num_equal} of those."
    )
    if num_equal < len(same):
        text += " Rounding, or the number that begins each prompt for a server, may change an answer."
    return text


def why_unclear(groups: Sequence[ComparedGroup], others_share: float | None, names: Sequence[str], remedy: str) -> str:
    """Return a sentence that says which of the named measures are unclear, why, and what to do; "" if none is.

    others_share: share of the cores that other programs kept busy; None if it is not known.
    remedy: how to measure longer.
    """
    unclear = [(group, name) for group in groups for name in names if group.interval(name).word == "unclear"]
    if not unclear:
        return ""
    what = "; ".join(f"{group.name}, {name}" if len(groups) > 1 else name for group, name in unclear)
    num = min(len(group.rounds) for group, _ in unclear)
    pairs = "one pair shows" if num == 1 else f"{num} pairs show"
    if others_share is None or others_share < BUSY_SHARE:
        return f"Unclear ({what}): {pairs} too little for times that differ so much: {remedy}."
    return (
        f"Unclear ({what}): {pairs} too little while other programs keep {others_share:.0%} of the cores busy. Close "
        f"them, or {remedy}."
    )
