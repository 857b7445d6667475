"""An engine of a lane: it computes prompts for others, or samples the answers to prompts that others have computed.

    prefill lane ──── KV, read over NIXL ────▶ decode lane
         └── host and port of a side channel, at which the reader asks where the KV is

vLLM's NixlConnector moves the KV. On a CPU it uses UCX over TCP and shared memory.
"""

import importlib
import importlib.util
import os
import socket
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError

Lane: TypeAlias = Literal["prefill", "decode"]
"""The two kinds of lanes: engines that compute prompts, and engines that sample the answers."""

KV_ROLES: dict[Lane, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

LEASE_S = 30.0
"""Seconds that a prefill lane keeps the KV of a complete prompt for a decode lane: vLLM's default. The decode lane's
heartbeats extend the lease once it has the request. After the lease, the blocks are reused: a read finds other KV."""

CPU_TRANSPORTS = "tcp,self,sm"  # of UCX; its search for others takes seconds, and finds none that helps

INSTALL = "pip install nixl  or, without a GPU,  pip install --no-deps nixl nixl-cu12"


def lane_args(
    lane: Lane, strategy: str, eviction: str | None, answer_ahead: bool, engine_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which an engine is a lane; raise ConfigurationError if others exclude that."""
    problem = None
    if engine_args.get("kv_transfer_config") is not None:
        problem = "kv_transfer_config in engine_args", "vLLM takes one KV connector. Leave one of them out"
    elif eviction not in (None, "recompute"):
        reason = "host memory and NIXL each need a KV connector, and vLLM takes one. Use eviction='recompute'"
        problem = f"eviction={eviction!r}", reason
    elif answer_ahead:
        problem = "answer_ahead=True", "the scheduler of a decode lane verifies no drafts. Leave one of them out"
    elif lane == "prefill" and strategy == "warming":
        problem = "strategy='warming'", "a prefill lane runs our scheduler. Use strategy='streaming'"
    if problem is not None:
        raise ConfigurationError(f"lane={lane!r} and {problem[0]} exclude each other: {problem[1]}")
    # If a prefill lane dies before its KV has been read, the decode lane computes the prompt itself.
    config = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[lane], "kv_load_failure_policy": "recompute"}
    return {"kv_transfer_config": config}


def lane_environment(lane: Lane | None) -> dict[str, str]:
    """Return the environment variables of a lane's engine; none without a lane. vLLM must have been imported.

    Each engine listens at a port of its own, which is free now. Variables of this process take precedence.

    :raises MissingDependencyError: NIXL is not installed.
    """
    if lane is None:
        return {}
    if importlib.util.find_spec("nixl") is None:
        raise MissingDependencyError("nixl", INSTALL)
    with socket.socket() as probe:
        probe.bind((os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"), 0))
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(probe.getsockname()[1])}
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        environment["UCX_TLS"] = os.environ.get("UCX_TLS", CPU_TRANSPORTS)
    return environment
