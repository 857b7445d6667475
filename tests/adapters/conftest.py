"""What the tests of adapters share."""

import re

import pytest

NOT_OFFERED = re.compile("(image|pdf)_tool_message|json_mode|_inputs|override|test_stream_time")
"""In the suite of LangChain's chat models, tests of what a pipeline has not, which the suite skips one by one."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if "::TestChatModelAtWork::" in item.nodeid and NOT_OFFERED.search(item.name)]
    left_out = [item for item in left_out if "DO_NOT_OVERRIDE" not in item.name]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
