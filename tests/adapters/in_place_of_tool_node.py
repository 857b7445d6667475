"""A plugin of pytest that runs LangGraph's own tests of its tool node with ours in its place.

pip download langgraph-prebuilt==1.1.3 --no-deps --no-binary langgraph-prebuilt
tar xf langgraph_prebuilt-1.1.3.tar.gz; cd langgraph_prebuilt-1.1.3
pip install pytest-mock syrupy langgraph-checkpoint-sqlite langgraph-checkpoint-postgres
PYTHONPATH=.:CHECKOUT:CHECKOUT/tests/adapters pytest -p in_place_of_tool_node tests
"""

import langgraph.prebuilt
from langgraph.prebuilt import chat_agent_executor, tool_node

from streamrag.adapters.langchain import StreamragToolNode

for module in (langgraph.prebuilt, chat_agent_executor, tool_node):
    module.ToolNode = StreamragToolNode  # type: ignore[attr-defined, misc]
