"""The number of tokens from which copying KV is faster than recomputing it, by a hardware profile."""

from collections.abc import Callable

from streamrag.engine.costs.step_profiles import DEFAULT_BUDGET, StepProfile, recompute_s

DEFAULT_MOST_TOKENS = 32_768


def step_budget(profile: StepProfile) -> int:
    """Return the token budget of a step that was measured with, or the default."""
    return int(profile.provenance.get("max_num_batched_tokens", DEFAULT_BUDGET))


def most_tokens(profile: StepProfile) -> int:
    """Return the number of tokens of the longest possible prompt, or the default if it is not recorded."""
    return int(profile.provenance.get("max_model_len", DEFAULT_MOST_TOKENS))


def crossing(profile: StepProfile, copies_s: Callable[[int], float], most: int) -> int | None:
    """Return the number of tokens, in whole blocks, from which copying KV is faster than recomputing it.

    Returns None if copying is never faster up to `most` tokens.

    copies_s: returns the seconds to copy a number of blocks.
    """
    size, budget = profile.block_size, step_budget(profile)

    def is_faster(num_blocks: int) -> bool:
        return copies_s(num_blocks) < recompute_s(profile, 0, num_blocks * size, budget)

    low, high = 0, 1
    while not is_faster(high):
        if high * size >= most:
            return None
        low, high = high, min(2 * high, max(most // size, high + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high * size


def describe_crossing(tokens: int | None, block_size: int) -> str:
    """Return a sentence on when copying in is faster than recomputing: never, always, or from `tokens` on."""
    if tokens is None:
        return "recomputing is always faster than copying in"
    if tokens == block_size:
        return "copying in is always faster than recomputing"
    return f"copying in is faster than recomputing from {tokens:,} tokens on"
