"""LangGraph's tool node, with tools that start and are read early."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

from langchain_core.messages import ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as make_tool
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolCallRequest

from streamrag.adapters.langchain.agent_step import OUTPUT, AgentStep, ToolOutput, end_all

_siblings: ContextVar["set[asyncio.Task[Any]] | None"] = ContextVar("streamrag tool calls", default=None)
"""The tasks of all calls that one run of the node executes."""


class StreamragToolNode(ToolNode):
    """LangGraph's `ToolNode`, whose tools start while the model still writes, and are read while they still write.

    Give it to the chat model too: `model.bind_tools(node)`. In async graphs, each tool then starts when its call is
    complete, and the next step's prompt is prefilled with what has come, in the order of the calls. Messages, prompts
    and answers are those of `ToolNode`.

    A tool whose function is a generator, async or not, writes its result in pieces: each a `str`, or an object with a
    `text`. The result is the pieces, joined; beyond 400,000 characters it is cut off, and says so.

    Tools start before the graph reaches the node. So bind the tools themselves, and not the node, if the graph or a
    tool asks a human before a call. A tool with injected arguments, or behind `wrap_tool_call`, always starts with the
    node. A call that the graph does not lead to the node within 10 s is cancelled. So are the other calls of the node,
    if it raises.

    tools: functions, generator functions, or LangChain tools.
    options: as for `ToolNode`.
    """

    def __init__(self, tools: Sequence[BaseTool | Callable[..., Any]], **options: Any) -> None:
        super().__init__([_returning_tool(each) for each in tools], **options)
        self.steps: dict[str, AgentStep] = {}
        """The steps whose tools have not all ended, by the ids of their calls."""

    def start_early(self, output: ToolOutput) -> "asyncio.Task[Any] | None":
        """Start the tool of a call and return its task; None if there is no such tool, or it needs the node's run."""
        name = output.call["name"]
        tool, injected = self.tools_by_name.get(name), self._injected_args.get(name)
        if tool is None or injected is None or self._wrap_tool_call or self._awrap_tool_call:
            return None
        if injected.state or injected.store or injected.runtime or injected.all_injected_keys:
            return None
        task = asyncio.create_task(_run_tool(tool, output), name=f"streamrag tool {name}")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as retrieved
        return task

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the tools as `ToolNode` does. If the node is cancelled, or one of them raises, stop the others."""
        siblings: set[asyncio.Task[Any]] = set()
        token = _siblings.set(siblings)
        try:
            return await super().ainvoke(input, config, **kwargs)
        finally:
            _siblings.reset(token)
            await end_all([task for task in siblings if not task.done()])

    async def _execute_tool_async(self, request: ToolCallRequest, input_type: Any, config: RunnableConfig) -> Any:
        """Run a tool as `ToolNode` does, or wait for it if it was started early; meanwhile, it is read."""
        if (siblings := _siblings.get()) is not None and (task := asyncio.current_task()):
            siblings.add(task)
        step = self.steps.get(request.tool_call["id"] or "")
        if step is None or step.loop is not asyncio.get_running_loop():
            return await super()._execute_tool_async(request, input_type, config)
        async with step.run(request.tool_call) as (output, started):
            if started is not None:
                request = request.override(tool=_started_tool(started, request.tool))
            result = await super()._execute_tool_async(request, input_type, config)
            output.end(result)
        return result


def _started_tool(task: "asyncio.Task[Any]", tool: BaseTool | None) -> BaseTool:
    """Return what waits for a tool that was started. One that interrupts the graph can do so only in the node: run it.

    LangGraph's node only calls `ainvoke`.
    """

    async def ainvoke(call: ToolCall, config: RunnableConfig) -> Any:
        try:
            return await task
        except GraphBubbleUp:
            assert tool is not None
            return await tool.ainvoke(call, config)

    return cast(BaseTool, SimpleNamespace(ainvoke=ainvoke))


async def _run_tool(tool: BaseTool, output: ToolOutput) -> Any:
    """Run a tool with this output, and with LangChain's configuration of the run in which the model answers."""
    OUTPUT.set(output)
    return await tool.ainvoke(output.call)


def _returning_tool(tool: BaseTool | Callable[..., Any]) -> BaseTool:
    """Return the tool; for one whose function is a generator, a tool that returns the joined pieces."""
    made: BaseTool = tool if isinstance(tool, BaseTool) else make_tool(tool)
    generate = getattr(made, "func", None)
    if inspect.isgeneratorfunction(generate):

        @wraps(generate)
        def join(*args: Any, **kwargs: Any) -> str:
            output = ToolOutput.claim(made.name)
            with closing(generate(*args, **kwargs)) as pieces:
                all(map(output.write, pieces))
            return output.text

        return made.model_copy(update={"func": join})
    if inspect.isasyncgenfunction(generate):

        @wraps(generate)
        async def join_async(*args: Any, **kwargs: Any) -> str:
            output = ToolOutput.claim(made.name)
            async with aclosing(generate(*args, **kwargs)) as pieces:
                async for piece in pieces:
                    if not output.write(piece):
                        break
            return output.text

        return made.model_copy(update={"func": None, "coroutine": join_async})
    return made
