from typing import Any

import pytest

from streamrag.backends.vllm import SchedulerOptions, VllmBackend
from streamrag.backends.vllm.client.arguments import KV_TRANSFER, default_eviction, kv_transfer_config, scheduler_args
from streamrag.backends.vllm.client.lane_engine import LEASE_S
from streamrag.errors import ConfigurationError


def args_of(
    engine_args: dict[str, Any] | None = None, host_kv_bytes: int | None = None, **options: Any
) -> dict[str, Any]:
    scheduler = SchedulerOptions(policy="fcfs", **options)
    return scheduler_args("streaming", scheduler, engine_args or {}, host_kv_bytes=host_kv_bytes)


def options_of(engine_args: dict[str, Any] | None = None, **options: Any) -> Any:
    return args_of(engine_args, **options)["additional_config"]["streamrag"]


@pytest.mark.parametrize("eviction", ["swap", "cost"])
def test_host_memory_comes_with_our_connector(eviction: str) -> None:
    args = args_of(eviction=eviction, host_kv_bytes=1 << 20, profile="h200")
    assert args["kv_transfer_config"] == KV_TRANSFER
    expected = {"policy": "fcfs", "eviction": eviction, "host_kv_bytes": 1 << 20, "profile": "h200"}
    assert args["additional_config"] == {"streamrag": expected}


def test_recomputing_needs_no_connector() -> None:
    args = args_of(eviction="recompute")
    assert "kv_transfer_config" not in args
    assert args["additional_config"] == {"streamrag": {"policy": "fcfs", "eviction": "recompute"}}


@pytest.mark.parametrize(
    "engine_args", [{"enable_prefix_caching": False}, {"kv_transfer_config": {"kv_connector": "TheirConnector"}}]
)
def test_host_memory_is_not_the_default_where_it_cannot_work(engine_args: dict[str, Any]) -> None:
    assert options_of(engine_args).get("eviction", "recompute") == "recompute"
    assert options_of().get("eviction", "recompute") == default_eviction() == "cost"


@pytest.mark.parametrize(
    ("engine_args", "options", "message"),
    [
        ({}, {"eviction": "magic"}, "eviction='magic' must be 'recompute', 'swap' or 'cost'"),
        ({}, {"host_kv_bytes": 0}, "host_kv_bytes=0 must be greater than or equal to 1"),
        ({"enable_prefix_caching": False}, {"eviction": "swap"}, "eviction='swap' is not possible: .* prefix cache"),
        ({"kv_transfer_config": {}}, {"eviction": "cost"}, "eviction='cost' is not possible: .* one KV connector"),
        (
            {"enable_prefix_caching": False, "additional_config": {"streamrag": {"eviction": "swap"}}},
            {},
            "eviction='swap' is not possible",
        ),
    ],
)
def test_eviction_options_that_cannot_work_are_refused_at_once(
    engine_args: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        args_of(engine_args, **options)


def test_warming_has_no_say_in_evictions() -> None:
    with pytest.raises(ConfigurationError, match=r"'eviction': 'swap'.* is for strategy=.streaming"):
        scheduler_args("warming", SchedulerOptions(eviction="swap"), {})


def test_vllm_takes_our_connector() -> None:
    config = kv_transfer_config()
    assert config.is_kv_transfer_instance
    # A consumer would get freed blocks late, see KV_TRANSFER.
    assert not config.is_kv_consumer


@pytest.mark.parametrize(("lane", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_lane_has_vllms_connector(lane: Any, role: str) -> None:
    args = VllmBackend("model", lane=lane, collect_stats=True)._engine_args
    assert args["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        **({"kv_connector_module_path": "streamrag.backends.vllm.nixl_connector"} if lane == "decode" else {}),
    }
    if lane == "prefill":  # our scheduler, without host memory
        assert args["additional_config"] == {"streamrag": {}}
        assert "StreamingScheduler" in args["scheduler_cls"] or args["scheduler_cls"].endswith("streaming_scheduler")
    else:
        assert "scheduler_cls" not in args


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lane": "both"}, "lane='both' must be 'prefill' or 'decode'"),
        (
            {"lane": "prefill", "scheduler": SchedulerOptions(eviction="swap")},
            "lane='prefill' and eviction='swap' exclude each other: host memory",
        ),
        ({"lane": "prefill", "answer_ahead": True}, "answer_ahead=True exclude each other: only our scheduler"),
        ({"lane": "decode", "answer_ahead": True}, "answer_ahead=True exclude each other: only our scheduler"),
        (
            {"lane": "decode", "engine_args": {"speculative_config": {"method": "ngram"}}},
            "lane='decode' and speculative_config in engine_args exclude each other: drafts were never tried",
        ),
        ({"lane": "prefill", "strategy": "warming"}, "strategy='warming' exclude each other: .* runs our scheduler"),
        ({"lane": "decode", "scheduler": SchedulerOptions(policy="fcfs")}, "with .warming., vLLM's own scheduler runs"),
        (
            {"lane": "decode", "engine_args": {"kv_transfer_config": {"kv_connector": "TheirConnector"}}},
            "lane='decode' and kv_transfer_config in engine_args exclude each other",
        ),
    ],
)
def test_options_that_a_lane_cannot_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        VllmBackend("model", **options)


def test_a_lane_may_recompute() -> None:
    args = VllmBackend("model", lane="prefill", scheduler=SchedulerOptions(eviction="recompute"))._engine_args
    assert args["additional_config"]["streamrag"]["eviction"] == "recompute"
