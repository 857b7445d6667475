"""An engine of a lane: it computes prompts for others, or samples the answers to prompts that others have computed.

    prefill lane ──── KV, read over NIXL ────▶ decode lane
         └── host and port of a side channel, at which the reader asks where the KV is

vLLM's NixlConnector moves the KV. On a CPU it uses UCX over TCP and shared memory.
"""

import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError

Lane: TypeAlias = Literal["prefill", "decode"]
"""The two kinds of lanes: engines that compute prompts, and engines that sample the answers."""

KV_ROLES: dict[Lane, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

LEASE_S = 30
"""Seconds that a prefill lane keeps the KV of a complete prompt for a decode lane. The decode lane's heartbeats extend
the lease once it has the request. After the lease, the blocks are reused: a read finds other KV."""

MAX_READ_S = LEASE_S - 5
"""Most seconds from the end of a prefill to the end of a read of its KV. Heartbeats do not count: they may come after
the lease. The rest of the lease is for the clocks of two nodes."""

READ_BY_KEY = "remote_blocks_expiry_time"
"""Key in vLLM's `kv_transfer_params` of the time by which the KV must have been read, as `seconds_since_boot` of the
decode lane's machine. vLLM passes it to `nixl_connector`, and uses it itself only if KV moves in both directions."""

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"

ON_CPU = {
    "UCX_TLS": "tcp,self,sm",  # UCX's search for other transports takes seconds, and finds none that helps
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind the threads of all engines to the same cores
}
"""Environment variables of a lane's engine on a CPU, unless this process has them."""

INSTALL = "pip install nixl  or, without a GPU,  pip install --no-deps nixl nixl-cu12"


def lane_args(
    lane: Lane, strategy: str, eviction: str | None, answer_ahead: bool, engine_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which an engine is a lane; raise ConfigurationError if others exclude that."""
    problem = None
    if engine_args.get("kv_transfer_config") is not None:
        problem = "kv_transfer_config in engine_args", "vLLM takes one KV connector. Leave one of them out"
    elif engine_args.get("speculative_config") is not None:
        problem = "speculative_config in engine_args", "drafts were never tried in lanes. Leave one of them out"
    elif eviction not in (None, "recompute"):
        reason = "host memory and NIXL each need a KV connector, and vLLM takes one. Use eviction='recompute'"
        problem = f"eviction={eviction!r}", reason
    elif answer_ahead:
        reason = "only our scheduler takes drafts of answers, and a decode lane runs vLLM's. Leave one of them out"
        problem = "answer_ahead=True", reason
    elif lane == "prefill" and strategy == "warming":
        problem = "strategy='warming'", "a prefill lane runs our scheduler. Use strategy='streaming'"
    if problem is not None:
        raise ConfigurationError(f"lane={lane!r} and {problem[0]} exclude each other: {problem[1]}")
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[lane],
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        # If a prefill lane dies before its KV has been read, the decode lane computes the prompt itself.
        "kv_load_failure_policy": "recompute",
    }
    if lane == "decode":
        config["kv_connector_module_path"] = "streamrag.backends.vllm.nixl_connector"
    return {"kv_transfer_config": config}


@contextmanager
def lane_environment(lane: Lane | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables with which a lane's engine starts inside; none without a lane.

    Each engine gets a free port of its own, whatever this process's variable says. Of the other variables, those of
    this process take precedence. vLLM must have been imported.

    :raises MissingDependencyError: NIXL is not installed.
    :raises ConfigurationError: the side channel's host is not one of this machine.
    """
    if lane is None:
        yield {}
        return
    if importlib.util.find_spec("nixl") is None:
        raise MissingDependencyError("nixl", INSTALL)
    host = os.environ.get(HOST, "localhost")
    # With this option on both sockets, the engine may listen at the port that this one holds. Nothing else gets the
    # port meanwhile; if something did, vLLM's engine would wait for ever.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, 0))
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(f"{HOST}={host!r} must be an address of this machine: {error}") from None
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(held.getsockname()[1])}
        if importlib.import_module("vllm.platforms").current_platform.is_cpu():
            environment |= {name: os.environ.get(name, value) for name, value in ON_CPU.items()}
        yield environment


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Facts of a running engine that other lanes depend on."""

    common: Mapping[str, str]  # must be equal in all lanes
    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks, as many as hold the tokens that vLLM says its cache has room for
    max_num_seqs: int  # most answers at a time; vLLM begins to read KV only while there are fewer


NO_LANE = LaneFacts({}, 1, 0, 0)  # facts of an engine that is not a lane


def lane_facts(config: Any) -> LaneFacts:
    """Return the facts of a running engine from vLLM's configuration of it."""
    model, cache, num_ranks = config.model_config, config.cache_config, config.parallel_config.data_parallel_size
    common = {name: str(getattr(model, name)) for name in ("model", "max_model_len", "dtype")}
    common |= {name: str(getattr(cache, name)) for name in ("cache_dtype", "block_size")}
    # vLLM sums blocks over data-parallel ranks, but not tokens. With several kinds of blocks, only tokens count.
    num_blocks = (cache.kv_cache_size_tokens or 0) * num_ranks // cache.block_size or cache.num_gpu_blocks
    max_num_seqs = getattr(config.scheduler_config, "max_num_active_seqs", None) or config.scheduler_config.max_num_seqs
    return LaneFacts(common, cache.block_size, num_blocks, max_num_seqs * num_ranks)
