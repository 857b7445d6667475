from typing import Any

import pytest

from streamrag.backends.vllm.client.arguments import KV_TRANSFER, default_eviction, kv_transfer_config, scheduler_args
from streamrag.errors import ConfigurationError


def args_of(engine_args: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return scheduler_args("streaming", "fcfs", None, engine_args or {}, **options)


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
def test_where_host_memory_cannot_be_had_it_is_not_the_default(engine_args: dict[str, Any]) -> None:
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
def test_what_cannot_work_is_refused_at_once(
    engine_args: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        args_of(engine_args, **options)


def test_warming_has_no_say_in_evictions() -> None:
    with pytest.raises(ConfigurationError, match=r"'eviction': 'swap'.* is for strategy=.streaming"):
        scheduler_args("warming", "fcfs", None, {}, eviction="swap")


def test_vllm_takes_our_connector() -> None:
    config = kv_transfer_config()
    assert config.is_kv_transfer_instance
    # A consumer would get freed blocks late, see KV_TRANSFER.
    assert not config.is_kv_consumer
