"""What the engine tells of itself after each step, if it is asked to; kept for whoever looks."""

from typing import Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.records import KvUse


class LastStats:
    """What vLLM calls a stat logger. With one, vLLM registers its own metrics with prometheus_client too."""

    def __init__(self) -> None:
        self._kv_use: dict[str, Any] | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, **ignored: Any) -> None:
        found = scheduler_stats and scheduler_stats.kv_connector_stats
        self._kv_use = (found or {}).get(KEY, self._kv_use)

    def log_engine_initialized(self) -> None:
        """There is nothing to tell."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """vLLM counts that itself."""

    def kv_use(self) -> KvUse | None:
        """As of the last step; None if none has told."""
        return None if self._kv_use is None else KvUse.from_dict(self._kv_use)
