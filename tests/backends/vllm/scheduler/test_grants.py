"""What a step computes of each request is what was planned."""

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_running_request_computes_as_many_tokens_as_it_is_granted(bench: Make, is_async: bool) -> None:
    b = bench(is_async=is_async, streamrag={"max_data_tokens": 4})
    scheduled: dict[str, list[int]] = {"data0": [], "data1": []}

    def on_step(step: Any, start_s: float, end_s: float) -> None:
        for name, num_tokens in step.num_scheduled_tokens.items():
            scheduled[name].append(num_tokens)

    b.engine.on_step = on_step
    for number, name in enumerate(scheduled):
        b.chunk(name, list(range(100 * number, 100 * number + 40)), request_class="stream")
    b.run()
    # The last token of a partial prompt is not computed. The first step starts each of the two, the others go on.
    assert scheduled == dict.fromkeys(scheduled, [4] * 9 + [3])
