"""LangGraph's tool node, with tools that start and are read early."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, closing, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import astuple
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakValueDictionary

from langchain_core.messages import LC_ID_PREFIX, AIMessage, ToolCall
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
        self.steps: WeakValueDictionary[str, AgentStep] = WeakValueDictionary()
        """The steps with calls that the node may still execute, by the ids of their messages."""

    def start_early(self, output: ToolOutput) -> "asyncio.Task[Any] | None":
        """Start the tool of a call and return its task; None if there is no such tool, or it needs the node's run."""
        name = output.call["name"]
        tool, is_wrapped = self.tools_by_name.get(name), self._wrap_tool_call or self._awrap_tool_call
        if tool is None or is_wrapped or any(astuple(self._injected_args[name])):
            return None

        async def run() -> Any:
            OUTPUT.set(output)
            return await tool.ainvoke(deepcopy(output.call))  # a tool may change its arguments

        task = asyncio.create_task(run(), name=f"streamrag tool {name}")
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
        step = self._step_of(request)
        run = nullcontext(ToolOutput(request.tool_call)) if step is None else step.run(request.tool_call)
        async with run as output:
            if output.started is not None:
                request = request.override(tool=_started_tool(output.started, request.tool))
            token = OUTPUT.set(output)
            try:
                output.end(await super()._execute_tool_async(request, input_type, config))
            finally:
                OUTPUT.reset(token)
                output.stop()
        return output.result

    def _step_of(self, request: ToolCallRequest) -> AgentStep | None:
        """Return the step in this event loop whose answer has a call; None if none has it, or it is not known which.

        A graph may have put the calls in a message of its own. Their ids are unique with most models, but not all.
        """
        call_id, state = request.tool_call["id"], request.state
        if not isinstance(state, list):
            key = self._messages_key
            state = state.get(key) if isinstance(state, dict) else getattr(state, key, None)
        message_id = next((each.id or "" for each in reversed(state or ()) if isinstance(each, AIMessage)), "")
        if message_id.startswith(LC_ID_PREFIX):
            steps = [self.steps.get(message_id)]
        else:
            steps = [step() for step in self.steps.valuerefs()]
        loop = asyncio.get_running_loop()
        found = [step for step in steps if step is not None and step.loop is loop and call_id in step.outputs]
        return found[0] if len(found) == 1 else None


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


def _returning_tool(tool: BaseTool | Callable[..., Any]) -> BaseTool:
    """Return the tool; for one whose function is a generator, a tool that returns the joined pieces."""
    made: BaseTool = tool if isinstance(tool, BaseTool) else make_tool(tool)
    joined: dict[str, Any] = {}
    for field in ("func", "coroutine"):
        generate = getattr(made, field, None)
        if inspect.isgeneratorfunction(generate):
            joined[field] = _joined(generate, made.name)
        elif inspect.isasyncgenfunction(generate):
            joined |= {field: None, "coroutine": _joined_async(generate, made.name)}
    return made.model_copy(update=joined) if joined else made


def _joined(generate: Callable[..., Generator[Any, None, None]], name: str) -> Callable[..., str]:
    @wraps(generate)
    def join(*args: Any, **kwargs: Any) -> str:
        output = ToolOutput.claim(name)
        with closing(generate(*args, **kwargs)) as pieces:
            all(map(output.write, pieces))
        return output.text

    return join


def _joined_async(generate: Callable[..., AsyncGenerator[Any, None]], name: str) -> Callable[..., Awaitable[str]]:
    @wraps(generate)
    async def join(*args: Any, **kwargs: Any) -> str:
        output = ToolOutput.claim(name)
        async with aclosing(generate(*args, **kwargs)) as pieces:
            async for piece in pieces:
                if not output.write(piece):
                    break
        return output.text

    return join
