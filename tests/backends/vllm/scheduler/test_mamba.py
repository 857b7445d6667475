"""Streams of models with Mamba layers, whose states vLLM keeps at ends of blocks: where prompts stop and go back to."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig

from streamrag.backends.simulated.config import EngineShape, kv_cache_config, vllm_config
from streamrag.backends.vllm.scheduler.supported import check_supported
from streamrag.errors import ConfigurationError

LAST = 30
"""Tokens of the first prompt: seven blocks of four, and two tokens more."""


@pytest.fixture(params=["recompute", "swap"])
def mamba(bench: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """With our KV connector vLLM looks up prefixes in another way, although it copies nothing of such models."""
    return bench(has_mamba=True, streamrag={"eviction": request.param, "num_host_blocks": 10})


def test_a_partial_prompt_is_computed_to_the_end_of_its_last_whole_block(mamba: Any) -> None:
    mamba.chunk("s", list(range(LAST)))
    mamba.run()
    assert mamba.scheduler.requests["s"].num_computed_tokens == 28
    mamba.chunk("s", [50, 51, 52], kept=LAST)
    mamba.run()
    assert mamba.scheduler.requests["s"].num_computed_tokens == 32
    mamba.chunk("s", [53], kept=33, is_complete=True)
    mamba.run()
    assert mamba.tokens("s") == mamba.fresh_answer([*range(LAST), 50, 51, 52, 53])


@pytest.mark.parametrize(
    ("num_shared", "num_left"),
    [(28, 28), (17, 16), (16, 16), (15, 0), (3, 0), (0, 0)],
    ids=["after all", "in a block", "at its end", "before the first state", "in the first block", "at 0"],
)
def test_an_update_goes_back_to_the_last_state_that_was_kept(mamba: Any, num_shared: int, num_left: int) -> None:
    prompt = list(range(LAST))
    mamba.chunk("s", prompt[:17])  # the state after 16 tokens is kept
    mamba.run()
    mamba.chunk("s", prompt[17:], kept=17)
    mamba.run()
    new = [*prompt[:num_shared], 60, 61, 62, 63, 64]
    mamba.chunk("s", new[num_shared:], kept=num_shared, is_complete=True)
    mamba.step()
    mamba.run()
    assert mamba.tokens("s") == mamba.fresh_answer(new)
    assert mamba.record("s").num_computed == 28 + len(new) - num_left


def test_an_update_starts_again_where_no_states_are_kept(bench: Callable[..., Any]) -> None:
    mamba = bench(has_mamba=True, has_prefix_cache=False)
    mamba.chunk("s", list(range(LAST)))
    mamba.run()
    assert mamba.scheduler.requests["s"].num_computed_tokens == LAST - 1
    mamba.chunk("s", [60, 61], kept=LAST, is_complete=False)
    mamba.run()
    assert mamba.scheduler.requests["s"].num_computed_tokens == LAST + 1
    mamba.chunk("s", [60, 61], kept=LAST - 2, is_complete=True)
    mamba.run()
    assert mamba.tokens("s") == mamba.fresh_answer([*range(LAST - 2), 60, 61])
    assert mamba.record("s").num_computed == LAST + 1 + LAST


def test_the_runner_forgets_an_old_state_although_a_step_without_tokens_came_between(mamba: Any) -> None:
    mamba.chunk("s", list(range(LAST)))
    mamba.run()
    mamba.scheduler.finished_req_ids.add("of another")  # vLLM then schedules a step that computes nothing
    mamba.step()
    mamba.chunk("s", [60, 61, 62], kept=5, is_complete=True)
    mamba.run()
    assert mamba.tokens("s") == mamba.fresh_answer([*range(5), 60, 61, 62])


def test_a_state_of_the_last_step_is_used_at_once_and_takes_no_memory_of_others(mamba: Any) -> None:
    mamba.chunk("a", list(range(17)))
    mamba.step()
    mamba.step()
    assert mamba.scheduler.requests["a"].num_computed_tokens == 16
    mamba.plain("b", 18)
    mamba.step()
    assert mamba.scheduler.requests["a"].num_computed_tokens == 16
    mamba.run()
    assert mamba.record("b").num_from_cache == 16


def too_short_steps(config: VllmConfig) -> None:
    config.scheduler_config.max_num_batched_tokens = 15


def hashes_of_half_blocks(config: VllmConfig) -> None:
    config.cache_config.prefix_match_unit = 8


def replay(config: VllmConfig) -> None:
    config.cache_config.use_replayssm = True


def another_connector(config: VllmConfig) -> None:
    config.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (too_short_steps, "steps of fewer tokens than a KV block"),
        (hashes_of_half_blocks, "a `prefix_match_unit`"),
        (replay, "ReplaySSM"),
        (another_connector, "a KV connector other than ours"),
    ],
)
def test_options_that_do_not_fit_mamba_layers_are_refused_by_name(
    change: Callable[[VllmConfig], None], name: str
) -> None:
    shape = EngineShape(100, has_mamba=True)
    config = vllm_config(shape)
    check_supported(config, kv_cache_config(shape))
    change(config)
    with pytest.raises(ConfigurationError, match=f"Mamba layers together with {name}"):
        check_supported(config, kv_cache_config(shape))
    check_supported(config, kv_cache_config(EngineShape(100)))
