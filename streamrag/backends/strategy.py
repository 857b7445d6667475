"""What an engine is told so that it prefills partial prompts in one way or the other."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from streamrag.backends.wire import KEY
from streamrag.engine import make_policy
from streamrag.errors import ConfigurationError

__all__ = ["Strategy", "scheduler_args"]

Strategy: TypeAlias = Literal["streaming", "warming"]
"""How partial prompts are prefilled: by streams into our scheduler, or by requests that fill vLLM's prefix cache."""

SCHEDULER = "streamrag.backends.scheduler.streaming_scheduler"


def scheduler_args(
    strategy: str, policy: str, can_partial_evict: bool | None, engine_args: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes vLLM run our scheduler, merged with what `engine_args` say.

    :raises ConfigurationError: they exclude each other, or there is no such policy.
    """
    if strategy not in get_args(Strategy):
        raise ConfigurationError(f"strategy={strategy!r} must be one of {', '.join(map(repr, get_args(Strategy)))}")
    if strategy == "warming":
        given: dict[str, Any] = {"policy": policy} if policy != "fcfs" else {}
        if can_partial_evict is not None:
            given["can_partial_evict"] = can_partial_evict
        if given:
            raise ConfigurationError(
                f'{given} is for strategy="streaming": with "warming", vLLM\'s own scheduler decides'
            )
        return {}
    make_policy(policy)
    if engine_args.get("scheduler_cls") is not None:
        raise ConfigurationError(
            'engine_args: scheduler_cls cannot be given with strategy="streaming", which brings its own scheduler. '
            'Leave it out, or use strategy="warming"'
        )
    theirs = engine_args.get("additional_config") or {}
    if not isinstance(theirs, dict):
        raise ConfigurationError(f'engine_args: additional_config={theirs!r} must be a dict with strategy="streaming"')
    options: dict[str, Any] = {"policy": policy}
    if can_partial_evict is not None:
        options["can_partial_evict"] = can_partial_evict
    return {"scheduler_cls": SCHEDULER, "additional_config": {**theirs, KEY: options | theirs.get(KEY, {})}}
