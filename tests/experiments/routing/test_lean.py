import asyncio

import pytest

from experiments.routing.cells import PROFILE, Cell, run_cell
from experiments.routing.lean import LeanEngine
from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile

STEP_S = 0.5


class Half:
    """Steps of half a second."""

    def step_s(self, parts):
        assert parts
        return STEP_S


def engine(kv_blocks=100, budget=8, **options):
    return LeanEngine(Half(), kv_blocks * 64, budget=budget * 64, **options)


async def ask(made, prompt, num_output=1, at_s=0.0):
    """When it was answered, and how many blocks were computed."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    async with made.stream(prompt, num_output, is_complete=True) as stream:
        async for _ in stream:
            pass
    return loop.time(), stream.num_spent


def run(made, *asked):
    async def all_of_them():
        return await asyncio.gather(*(ask(made, *each) for each in asked))

    return run_virtual(all_of_them())


def test_prompts_are_computed_in_order_within_the_budget_of_a_step():
    assert run(engine(), (range(12),), (range(100, 104),)) == [(1.0, 12), (1.0, 4)]
    assert run(engine(), (range(12),), (range(100, 105),)) == [(1.0, 12), (1.5, 5)]


def test_computed_tokens_are_found_again_but_for_the_last_block():
    made = engine()
    assert run(made, (range(8),), (range(8), 1, 1.0), ([*range(4), 9], 1, 2.0)) == [(0.5, 8), (1.5, 1), (2.5, 1)]
    assert made.report().cache_hit_rate == pytest.approx((7 + 4) / 21)


def test_the_least_recently_used_prompt_is_forgotten_from_its_end():
    made = engine(kv_blocks=12)
    asked = [(range(5),), (range(100, 106), 1, 1.0), (range(5), 1, 2.0), ([*range(100, 106), 7], 1, 3.0)]
    assert [num for _, num in run(made, *asked)] == [5, 6, 1, 2], "of the second prompt one block had to go"


def test_a_prompt_waits_until_it_fits():
    made = engine(kv_blocks=12)
    assert run(made, (range(8), 3), (range(100, 106),)) == [(1.5, 8), (2.0, 6)]


def test_decoding_alone_is_interrupted_at_the_end_of_a_step():
    made = engine()
    assert run(made, (range(2), 9), (range(100, 102), 1, 1.2)) == [(4.5, 2), (2.0, 2)]
    assert made.num_steps == 9
    assert made.busy_s == 4.5


def test_an_abort_frees_what_was_held():
    async def main():
        made = engine(kv_blocks=12)
        async with made.stream(range(8), 5, is_complete=True):
            await asyncio.sleep(0.7)
        assert made.report().kv_usage == 0
        return await ask(made, range(100, 110))

    assert run_virtual(main()) == (1.0 + 1.0, 10)


@pytest.mark.parametrize(("looks_again", "num_spent"), [(False, 3 + 3), (True, 3 + 1)])
def test_a_stream_that_grows_finds_more_only_if_it_looks_again(looks_again, num_spent):
    async def main():
        made = engine(looks_again=looks_again)
        await ask(made, range(6))
        async with made.stream([50, 51, 52], 1, is_complete=False) as other:
            await asyncio.sleep(1.0)
            assert other.num_left == 0
            await other.update([50, 0, 1], is_complete=False)
            await asyncio.sleep(1.0)
            assert other.num_spent == 3 + 2, "what is behind another block is another block"
        async with made.stream([0, 61, 62], 1, is_complete=False) as stream:
            await asyncio.sleep(1.0)
            assert stream.num_spent == 2
            await stream.update(range(5), is_complete=True)
            async for _ in stream:
                pass
        return 1 + stream.num_spent

    assert run_virtual(main()) == 1 + 2 + (1 if looks_again else 4)


def test_the_lean_engine_agrees_closely_with_the_whole_one():
    profile = load_profile(PROFILE)
    assert profile.name == PROFILE
    for load in ("conversations", "trees"):
        lean, whole = (run_cell(Cell(load, 2, "routers", "soonest", 60, engine=kind), {}) for kind in ("lean", "whole"))
        for name in ("mean_s", "p95_s", "hit_rate", "busy", "tokens_per_s"):
            # The whole one's steps are sized (DECISIONS 69), which is worth most to the prompts of trees.
            assert lean[name] == pytest.approx(whole[name], rel=0.15 if name == "p95_s" else 0.1), (load, name)
