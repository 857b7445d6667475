"""The environment in which a lane's engine starts."""

import importlib.util
import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import zmq

from streamrag.backends.lanes.lane_choice import check_common
from streamrag.backends.vllm.client import lane_engine
from streamrag.backends.vllm.client.lane_engine import lane_environment, lane_facts
from streamrag.errors import ConfigurationError, MissingDependencyError

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())


def platform(monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool) -> None:
    module = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setattr(lane_engine.importlib, "import_module", lambda name: module)


def test_an_engine_without_a_lane_needs_nothing() -> None:
    with lane_environment(None) as environment:
        assert environment == {}


def test_a_lane_needs_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="nixl"), lane_environment("decode"):
        pass


@pytest.mark.usefixtures("nixl")
def test_only_the_engine_can_listen_at_its_port() -> None:
    with lane_environment("prefill") as one, lane_environment("decode") as other:
        assert one[PORT] != other[PORT]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("localhost", int(one[PORT])))
        context = zmq.Context()
        try:
            engine = context.socket(zmq.ROUTER)  # as vLLM's engine does
            engine.bind(f"tcp://localhost:{one[PORT]}")
        finally:
            context.destroy(linger=0)


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "a..b"])
def test_a_host_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    with pytest.raises(ConfigurationError, match=f"HOST='{host}' must be an address"), lane_environment("prefill"):
        pass


@pytest.mark.usefixtures("nixl")
def test_threads_of_lanes_on_a_cpu_are_bound_to_no_core_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in lane_engine.ON_CPU:
        monkeypatch.delenv(name, raising=False)
    platform(monkeypatch, is_cpu=True)
    with lane_environment("prefill") as environment:
        assert environment.items() >= lane_engine.ON_CPU.items()
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with lane_environment("prefill") as environment:
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    platform(monkeypatch, is_cpu=False)
    with lane_environment("prefill") as environment:
        assert list(environment) == [PORT]


def config_of(*, num_ranks: int = 1, num_tokens: int | None = None) -> Any:
    cache = SimpleNamespace(cache_dtype="auto", block_size=32, kv_cache_size_tokens=num_tokens, num_gpu_blocks=20)
    model = SimpleNamespace(model="org/model", max_model_len=100, dtype="torch.float32")
    parallel = SimpleNamespace(data_parallel_size=num_ranks)
    scheduler = SimpleNamespace(max_num_seqs=8)
    return SimpleNamespace(model_config=model, cache_config=cache, parallel_config=parallel, scheduler_config=scheduler)


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "num_blocks"), [(None, 1, 20), (320, 1, 10), (320, 4, 40), (None, 4, 20)]
)
def test_the_kv_blocks_of_a_lane_are_those_that_its_tokens_fill(
    num_tokens: int | None, num_ranks: int, num_blocks: int
) -> None:
    facts = lane_facts(config_of(num_tokens=num_tokens, num_ranks=num_ranks))
    assert (facts.block_size, facts.num_blocks, facts.max_num_seqs) == (32, num_blocks, 8 * num_ranks)


def test_a_lower_limit_of_active_answers_counts() -> None:
    config = config_of(num_ranks=2)
    config.scheduler_config.max_num_active_seqs = 3
    assert lane_facts(config).max_num_seqs == 6


def test_the_first_difference_of_lanes_is_named() -> None:
    facts = lane_facts(config_of()).common
    check_common({"prefill-0": facts, "decode-0": dict(facts)})
    with pytest.raises(
        ConfigurationError, match=r"lanes differ in dtype: torch\.float32 in prefill-0, torch\.half in decode-1"
    ):
        check_common({"prefill-0": facts, "decode-0": facts, "decode-1": {**facts, "dtype": "torch.half"}})
