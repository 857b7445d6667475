"""Engines for sessions in virtual time: vLLM's own scheduler and KV cache manager, or ours, and a device's profile."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.core import ModelInfo
from streamrag.engine.costs.step_profiles import StepProfile
from studies.sessions.prices import ShortPieces
from studies.sessions.simulated_backend import SimulatedBackend

MAX_MODEL_LEN = 40_000


class Meter:
    """What the engine did: called with each step."""

    def __init__(self, profile: StepProfile) -> None:
        self._step_s = by_parts(profile.step_s)
        self.pool: Any = None
        """vLLM's KV blocks."""
        self.busy_s = 0.0
        self.num_computed = 0
        """Tokens."""
        self.most_blocks = 0
        """KV blocks that were in use at once."""

    def reset(self) -> None:
        """From here on."""
        self.busy_s, self.num_computed, self.most_blocks = 0.0, 0, 0

    def __call__(self, step: Any, start_s: float) -> float:
        took_s = self._step_s(step, start_s)
        self.busy_s += took_s
        self.num_computed += step.total_num_scheduled_tokens
        self.most_blocks = max(self.most_blocks, self.pool.num_gpu_blocks - self.pool.get_num_free_blocks())
        return took_s


@dataclass(frozen=True)
class Device:
    """What an engine is simulated on, and how its scheduler is set."""

    profile: StepProfile
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Options of our scheduler, as in `streamrag.backends.vllm.scheduler_options`."""


@dataclass(frozen=True)
class Site:
    """A running engine."""

    engine: SimulatedEngine
    client: SimulatedClient
    backend: SimulatedBackend
    meter: Meter

    @property
    def most_kv_tokens(self) -> int:
        """KV that was in use at once."""
        return self.meter.most_blocks * self.client.block_size


@asynccontextmanager
async def simulated(device: Device, *, is_stock: bool = False, has_prefix_cache: bool = True) -> AsyncIterator[Site]:
    """An engine, with our scheduler or with vLLM's own."""
    profile = device.profile
    shape = EngineShape(
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        is_async=profile.is_async,
        has_prefix_cache=has_prefix_cache,
        streamrag={} if is_stock else dict(device.scheduler),
    )
    meter = Meter(profile)
    engine = simulated_engine(shape, meter, is_stock=is_stock)
    meter.pool = engine.scheduler.kv_cache_manager.block_pool
    async with SimulatedClient(engine, delivery_s=profile.delivery_s) as client:
        yield Site(
            engine, client, SimulatedBackend(client, ModelInfo("simulated", ShortPieces(), MAX_MODEL_LEN)), meter
        )
