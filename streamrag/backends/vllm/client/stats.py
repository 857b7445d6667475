"""Statistics that the engine reports after each step."""

import time
from dataclasses import dataclass
from typing import Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.records import KvUse
from streamrag.support.bounded_reading import as_dataclass


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step, timed by the engine's process. `end_s` is when this process received its statistics, slightly later."""

    end_s: float
    elapsed_s: float
    num_tokens: int
    num_requests: int


class EngineStats:
    """A stat logger for vLLM. With one, vLLM also registers its own metrics with prometheus_client.

    keeps_steps: whether to keep `steps`, of an engine with `enable_logging_iteration_details`.
    """

    def __init__(self, *, keeps_steps: bool = False) -> None:
        self.steps: list[MeasuredStep] = []
        self.num_received_bytes = 0  # KV that a decode lane has fetched, as NIXL counts it
        self._keeps_steps = keeps_steps
        self._kv_use: dict[str, Any] | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, **ignored: Any) -> None:
        """Keep the newest KV use and, if steps are kept, append the step. Called by vLLM after each step."""
        if not scheduler_stats:
            return
        of_connector = scheduler_stats.kv_connector_stats or {}
        self._kv_use = of_connector.get(KEY, self._kv_use)
        self.num_received_bytes += sum(of_connector.get("bytes_transferred", ()))
        details = scheduler_stats.iteration_details
        if self._keeps_steps and details:
            num_tokens = details.num_ctx_tokens + details.num_generation_tokens
            num_requests = details.num_ctx_requests + details.num_generation_requests
            self.steps.append(MeasuredStep(time.monotonic(), details.elapsed_ms / 1e3, num_tokens, num_requests))

    def log_engine_initialized(self) -> None:
        """Do nothing, because there is no configuration to log; vLLM requires the method."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing, because vLLM counts sleep states itself; vLLM requires the method."""

    def kv_use(self) -> KvUse | None:
        """Return the use of KV memory as of the last step; None before any step has reported it."""
        return None if self._kv_use is None else as_dataclass(KvUse, self._kv_use)
