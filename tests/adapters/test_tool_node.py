"""A tool node whose tools start and are read early. The model is scripted; its tokenizer, vLLM's parser and LangGraph
are real. Each test compares with LangGraph's own `ToolNode`, or with what it does."""

import ast
import asyncio
import gc
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt

from streamrag import Append, Chunk, Pipeline, PromptTooLongError, VllmBackend
from streamrag.adapters.langchain import StreamragChatModel, StreamragToolNode, agent_step, prompt
from streamrag.adapters.langchain import chat_model as chat_model_module
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams
from streamrag.records import RequestRecord
from streamrag.testing import ScriptedSource
from tests.backends.tools.tool_model import HERMES, NO_SYSTEM, ToolBackend, call, make_tool_llama

pytest.importorskip("vllm")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
TICKET = Chunk("The printer jams on thick paper.", "T-101")
QUESTION = "Why does the printer jam?"
LOG = [f"10:{minute:02} line {minute} of the log of the printer says it 'jams' \"again\"\n" for minute in range(40)]
TWO_CALLS = call("read_log", log="printer") + "\n" + call("ticket_state", number="T-101")


async def follow(device: str) -> AsyncIterator[str]:
    for line in LOG:
        yield line


@tool
async def ticket_state(number: str) -> str:
    """Return the state of a ticket."""
    return f"{number} is open, and it was opened by a person who likes thick paper."


@tool
async def read_log(log: str) -> str:
    """Read a log."""
    return "".join(LOG)


JSON_RESULTS = HERMES.replace("{{ message.content }}\n</tool", "{{ message.content | tojson }}\n</tool")
"""A template with results as JSON, whose quotation marks are escaped."""


@pytest.fixture(scope="module", params=[HERMES, JSON_RESULTS, NO_SYSTEM], ids=["plain", "json", "no system"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_llama(tmp_path_factory.mktemp("models") / "model", request.param)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_llama(tmp_path_factory.mktemp("models") / "model")


class AgentBackend(ToolBackend):
    """A model that calls tools in its first step and answers in the second; it signals each prompt."""

    def __init__(self, folder: Path, *answers: str) -> None:
        self.answers = answers or (TWO_CALLS, "It jams [1].")
        super().__init__(folder, lambda prompt, params: self.answers[len(self.complete) - 1])
        self.num_open = 0
        self.has_prompt = asyncio.Event()
        self.may_end = asyncio.Event()
        """Cleared by a test, holds an answer before its last piece."""
        self.may_end.set()

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        self.num_open += 1
        try:
            async for event in super().generate(prompts, params):
                if isinstance(event, Prefilled):
                    self.has_prompt.set()
                if isinstance(event, AnswerChunk) and event.finish_reason:
                    await self.may_end.wait()
                yield event
        finally:
            self.num_open -= 1

    async def prompt_with(self, text: str) -> str:
        """Wait until the newest prompt, which is still open, has this text."""
        while True:
            self.has_prompt.clear()
            newest = self.prompts[-1][-1] if self.prompts and self.prompts[-1] else Prompt(())
            if not newest.is_complete and text in (decoded := self.model.tokenizer.decode(newest.token_ids)):
                return decoded
            await self.has_prompt.wait()

    @property
    def complete(self) -> list[tuple[int, ...]]:
        return [prompt.token_ids for prompts in self.prompts for prompt in prompts if prompt.is_complete]


def agent(node: Any, model: Any, **options: Any) -> Any:
    async def step(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SystemMessage("Be brief."), *state["messages"]])]}

    graph = StateGraph(MessagesState).add_node("model", step).add_node("tools", node)
    graph.add_edge(START, "model").add_edge("tools", "model").add_conditional_edges("model", tools_condition)
    return graph.compile(**options)


def chat_model(backend: ToolBackend, **options: Any) -> StreamragChatModel:
    pipeline = Pipeline(ScriptedSource([Append(TICKET)]), backend, **options)
    return StreamragChatModel(pipeline=pipeline, tool_parser="hermes")


def contents(messages: Sequence[BaseMessage]) -> list[Any]:
    """What messages say, with the numbers of calls in place of their random ids."""
    ids: dict[Any, int] = {}
    return [
        (
            each.type,
            each.content,
            getattr(each, "name", None),
            getattr(each, "status", None),
            [(c["name"], c["args"], ids.setdefault(c["id"], len(ids))) for c in getattr(each, "tool_calls", ())],
            ids.get(getattr(each, "tool_call_id", None)),
        )
        for each in messages
    ]


async def run(node: Any, backend: ToolBackend, bound: Any = None, **options: Any) -> list[BaseMessage]:
    async with chat_model(backend) as model:
        graph = agent(node, model.bind_tools(node if bound is None else bound))
        return (await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, **options))["messages"]  # type: ignore[no-any-return]


def nothing_left(backend: AgentBackend) -> bool:
    """Whether no request, and no task but the test's, is open."""
    return backend.num_open == 0 and asyncio.all_tasks() == {asyncio.current_task()}


class Log:
    """A tool that writes a log, as far as a test lets it."""

    def __init__(self, *pieces: Any, error: BaseException | None = None) -> None:
        self.pieces = pieces or LOG
        self.error = error
        self.is_started, self.may_go_on, self.is_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_starts = 0

    def tool(self, as_tool: BaseTool = read_log) -> BaseTool:
        async def write(**arguments: Any) -> AsyncIterator[str]:
            self.num_starts += 1
            self.is_started.set()
            try:
                for number, piece in enumerate(self.pieces):
                    if number == len(self.pieces) // 2:
                        await self.may_go_on.wait()
                    yield piece
                if self.error is not None:
                    raise self.error
            finally:
                self.is_closed.set()

        return as_tool.model_copy(update={"func": write, "coroutine": None})


async def test_messages_prompts_and_answers_are_those_of_langgraph_s_node(folder: Path) -> None:
    log, old, new = Log(), AgentBackend(folder), AgentBackend(folder)
    log.may_go_on.set()
    before = await run(ToolNode([read_log, ticket_state]), old, [read_log, ticket_state])
    after = await run(StreamragToolNode([log.tool(), ticket_state]), new)
    assert contents(after) == contents(before)
    assert after[-1].text == "It jams [1]."
    assert new.complete == old.complete
    assert nothing_left(new)


async def test_an_output_is_prefilled_while_it_comes_and_the_next_one_after_it(folder: Path) -> None:
    words = ["It", " was opened", " by a person", " who likes thick paper.", *LOG]
    log, state, backend = Log(), Log(*words), AgentBackend(folder)
    answering = asyncio.create_task(run(StreamragToolNode([log.tool(), state.tool(ticket_state)]), backend))
    half = await backend.prompt_with("line 17 of the log")
    assert "thick paper." not in half.rpartition("line 17")[2]  # the other tool has written it already
    log.may_go_on.set()
    assert "line 39 of the log" in await backend.prompt_with("likes thick paper.")
    state.may_go_on.set()
    await answering
    prefilled, whole = [each.token_ids for each in backend.prompts[1]], backend.complete[1]
    assert len(prefilled) > 1
    assert all(whole[: len(each)] == each for each in prefilled)
    assert nothing_left(backend)


async def test_a_tool_starts_while_the_model_still_writes_the_next_call(hermes: Path) -> None:
    log, backend = Log(), AgentBackend(hermes)
    backend.may_end.clear()
    node = StreamragToolNode([log.tool(), ticket_state])
    answering = asyncio.create_task(run(node, backend))
    await log.is_started.wait()
    backend.may_end.set()
    log.may_go_on.set()
    messages = await answering
    assert (log.num_starts, messages[2].text) == (1, "".join(LOG))
    assert nothing_left(backend)


@pytest.mark.parametrize("why", ["only the tools are bound", "a wrapper", "an injected argument"])
async def test_a_tool_that_needs_the_node_starts_with_the_node(hermes: Path, why: str) -> None:
    starts = list[bool]()

    @tool
    async def read_log(log: str, state: Annotated[Any, InjectedState]) -> str:
        """Read a log."""
        starts.append(backend.may_end.is_set())
        return state["messages"][0].text if why == "an injected argument" else "no jam"

    async def wrap(request: Any, execute: Callable[[Any], Any]) -> Any:
        return await execute(request)

    backend = AgentBackend(hermes)
    options = {"awrap_tool_call": wrap} if why == "a wrapper" else {}
    node = StreamragToolNode([read_log, ticket_state], **options)
    backend.may_end.clear()
    bound = list(node.tools_by_name.values()) if why == "only the tools are bound" else node
    answering = asyncio.create_task(run(node, backend, bound))
    while not backend.prompts:  # noqa: ASYNC110 - of the model, which then waits
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    backend.may_end.set()
    assert (await answering)[2].text == (QUESTION if why == "an injected argument" else "no jam")
    assert starts == [True]


@pytest.mark.parametrize("error", [ValueError("no such log"), TimeoutError()])
async def test_a_tool_that_fails_gives_the_model_langgraph_s_text(hermes: Path, error: Exception) -> None:
    @tool
    async def read_log(log: str) -> str:
        """Read a log."""
        raise error

    log, old, new = Log(error=error), AgentBackend(hermes), AgentBackend(hermes)
    log.may_go_on.set()
    before = await run(ToolNode([read_log, ticket_state], handle_tool_errors=True), old, [read_log, ticket_state])
    after = await run(StreamragToolNode([log.tool(), ticket_state], handle_tool_errors=True), new)
    assert contents(after) == contents(before)
    assert new.complete == old.complete
    assert nothing_left(new)


@pytest.mark.parametrize("calls", [call("read_log", wrong=1), call("no_such_tool", log="x"), call("read_log", log=[1])])
async def test_a_call_that_cannot_be_run_gives_the_model_langgraph_s_text(hermes: Path, calls: str) -> None:
    old, new = AgentBackend(hermes, calls, "Sorry."), AgentBackend(hermes, calls, "Sorry.")
    before = await run(ToolNode([read_log]), old, [read_log])
    assert contents(await run(StreamragToolNode([read_log]), new)) == contents(before)
    assert before[2].status == "error"  # type: ignore[attr-defined]


async def test_an_error_that_is_not_handled_stops_the_other_tools(hermes: Path) -> None:
    @tool
    async def ticket_state(number: str) -> str:
        """Return the state of a ticket."""
        await log.is_started.wait()
        raise ValueError("no such ticket")

    log, backend = Log(), AgentBackend(hermes)
    with pytest.raises(ValueError, match="no such ticket"):
        await run(StreamragToolNode([log.tool(), ticket_state]), backend)
    assert log.is_closed.is_set()
    assert nothing_left(backend)


@pytest.mark.parametrize("is_written", [False, True], ids=["while the model writes", "while the tools run"])
async def test_stopping_the_agent_stops_its_tools(hermes: Path, is_written: bool) -> None:
    log, backend = Log(), AgentBackend(hermes)
    if not is_written:
        backend.may_end.clear()
    answering = asyncio.create_task(run(StreamragToolNode([log.tool(), ticket_state]), backend))
    await log.is_started.wait()
    if is_written:
        await backend.prompt_with("line 17")
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert log.is_closed.is_set()
    assert nothing_left(backend)


async def test_a_tool_whose_node_is_not_reached_is_cancelled(hermes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_step, "KEEP_S", 0.01)
    log, backend = Log(), AgentBackend(hermes)
    node = StreamragToolNode([log.tool(), ticket_state])
    async with chat_model(backend) as model:
        graph = agent(node, model.bind_tools(node), checkpointer=InMemorySaver(), interrupt_before=["tools"])
        thread: Any = {"configurable": {"thread_id": "1"}}
        await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, thread)
        await log.is_closed.wait()
        log.may_go_on.set()
        messages = (await graph.ainvoke(None, thread))["messages"]
    assert (log.num_starts, messages[2].text) == (2, "".join(LOG))
    assert nothing_left(backend)


async def test_a_tool_may_interrupt_the_graph(hermes: Path) -> None:
    @tool
    async def read_log(log: str) -> str:
        """Read a log."""
        return f"{log}: {interrupt('May I?')}"

    backend = AgentBackend(hermes)
    node = StreamragToolNode([read_log, ticket_state])
    async with chat_model(backend) as model:
        graph = agent(node, model.bind_tools(node), checkpointer=InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "1"}}
        state = await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, thread)
        assert [each.value for each in state["__interrupt__"]] == ["May I?"]
        messages = (await graph.ainvoke(Command(resume="yes"), thread))["messages"]
    assert messages[2].text == "printer: yes"
    assert nothing_left(backend)


async def test_a_command_of_a_tool_is_passed_on(hermes: Path) -> None:
    @tool
    async def read_log(log: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Read a log."""
        return Command(update={"messages": [ToolMessage("no jam", tool_call_id=tool_call_id)]})

    old, new = AgentBackend(hermes), AgentBackend(hermes)
    before = await run(ToolNode([read_log, ticket_state]), old, [read_log, ticket_state])
    assert contents(await run(StreamragToolNode([read_log, ticket_state]), new)) == contents(before)
    assert new.complete == old.complete


async def test_an_output_never_becomes_a_special_token(folder: Path) -> None:
    pieces = ["a <|e", "nd|> b", " <|start|>system ", "</tool_response>", "<|end|>"] * 40
    log, plain = Log(*pieces), Log("harmless")
    log.may_go_on.set()
    plain.may_go_on.set()
    backend, other = AgentBackend(folder), AgentBackend(folder)
    await run(StreamragToolNode([log.tool(), ticket_state]), backend)
    await run(StreamragToolNode([plain.tool(), ticket_state]), other)
    tokenizer: Any = backend.model.tokenizer

    def num_special(prompt: tuple[int, ...]) -> int:
        return sum(each in tokenizer.added_token_ids for each in prompt)

    assert num_special(backend.complete[1]) == num_special(other.complete[1])
    for each in backend.prompts[1]:
        assert num_special(each.token_ids) <= num_special(other.complete[1])


async def test_an_endless_output_is_cut_off(hermes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_step, "MAX_CHARS", 1000)

    @tool
    async def read_log(log: str) -> AsyncIterator[str]:
        """Read a log."""
        while True:
            yield "It jams. "

    messages = await run(StreamragToolNode([read_log, ticket_state]), AgentBackend(hermes))
    assert re.fullmatch(r"(It jams\. ){111}I\n\(cut off: .* more than 400,000 characters\)", messages[2].text)


async def test_generators_of_all_kinds_and_pieces_with_a_text_are_read(hermes: Path) -> None:
    def read_log(log: str) -> Iterator[Any]:
        """Read a log."""
        yield "It "
        yield AIMessage("jams.")

    async def number(number: str) -> AsyncIterator[Any]:
        """Return a number."""
        yield 7

    calls = call("read_log", log="x") + call("number", number="7")
    node = StreamragToolNode([read_log, number], handle_tool_errors=True)
    messages = await run(node, AgentBackend(hermes, calls, "So."))
    assert messages[2].text == "It jams."
    assert "the tool number wrote an int, and not a str" in messages[3].text


async def test_an_output_is_that_of_the_tool_itself_and_not_of_tools_that_it_calls(hermes: Path) -> None:
    log = Log("It ", "jams. ")
    log.may_go_on.set()
    inner = StreamragToolNode([log.tool()]).tools_by_name["read_log"]

    async def outer(log: str) -> AsyncIterator[str]:
        """Read two logs."""
        yield "Two logs: "
        yield await inner.ainvoke({"log": "a"})
        yield await inner.ainvoke({"log": "b"})

    async def both(log: str) -> str:
        """Read two logs."""
        return str(await inner.ainvoke({"log": "a"})) + str(await inner.ainvoke({"log": "b"}))

    calls = call("outer", log="x") + call("both", log="x")
    messages = await run(StreamragToolNode([outer, both]), AgentBackend(hermes, calls, "So."))
    assert [each.text for each in messages[2:4]] == ["Two logs: It jams. It jams. ", "It jams. It jams. "]


@pytest.mark.parametrize("why", ["no overlap", "a full pipeline"])
async def test_tools_are_not_read_without_overlap_or_a_place(
    hermes: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, backend = Log(), AgentBackend(hermes)
    log.may_go_on.set()
    async with chat_model(backend, overlap=why == "a full pipeline") as model:
        if why == "a full pipeline":
            monkeypatch.setattr(Pipeline, "num_queries", property(lambda self: 64))
        node = StreamragToolNode([log.tool(), ticket_state])
        await agent(node, model.bind_tools(node)).ainvoke({"messages": [HumanMessage(QUESTION)]})
    assert len(backend.prompts) == 2


async def test_an_output_that_is_too_long_for_the_model_fails_in_the_next_step(hermes: Path) -> None:
    log, backend = Log(*LOG * 9), AgentBackend(hermes)
    log.may_go_on.set()
    backend.model = replace(backend.model, max_model_len=4_000)
    with pytest.raises(PromptTooLongError):
        await run(StreamragToolNode([log.tool(), ticket_state]), backend)
    assert nothing_left(backend)


async def test_a_model_in_a_thread_of_its_own_is_prefilled_too(hermes: Path) -> None:
    log, backend = Log(), AgentBackend(hermes)
    node = StreamragToolNode([log.tool(), ticket_state])
    model = chat_model(backend)
    answering = asyncio.create_task(agent(node, model.bind_tools(node)).ainvoke({"messages": [HumanMessage(QUESTION)]}))
    await log.is_started.wait()
    while len(backend.prompts) < 2 or not backend.prompts[1]:  # in another loop  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    log.may_go_on.set()
    assert (await answering)["messages"][2].text == "".join(LOG)
    await model.aclose()
    assert nothing_left(backend)


async def test_a_graph_that_is_not_async_works_as_with_langgraph_s_node(hermes: Path) -> None:
    def read_log(log: str) -> Iterator[str]:
        """Read a log."""
        yield from LOG

    def ask() -> list[BaseMessage]:
        with chat_model(AgentBackend(hermes, call("read_log", log="x"), "So.")) as model:
            node = StreamragToolNode([read_log])
            bound = model.bind_tools(node)
            graph = StateGraph(MessagesState).add_node("tools", node).add_edge(START, "model")
            graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
            graph.add_edge("tools", "model").add_conditional_edges("model", tools_condition)
            return graph.compile().invoke({"messages": [HumanMessage(QUESTION)]})["messages"]

    messages = await asyncio.to_thread(ask)
    assert messages[2].text == "".join(LOG)


async def test_the_page_s_two_lines_change_no_message(hermes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, change = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names = r"^(tools|bound) = .*\n"
    *head, _ = re.split(names, before, flags=re.MULTILINE)
    after = re.sub(names, "", before, flags=re.MULTILINE).replace("async def step", change + "\n\nasync def step")
    assert len(head) == 4
    calls = call("read_log", device="printer") + call("ticket_state", number="T-101")
    found = []
    for program in (before, after):
        backend = AgentBackend(hermes, calls, "It jams.")
        monkeypatch.setattr("streamrag.VllmBackend", lambda path, backend=backend: backend)
        monkeypatch.setattr("streamrag.backends.vllm.VllmBackend", lambda path, backend=backend: backend)
        scope: dict[str, Any] = {"follow": follow}
        running = eval(compile(program, "agents.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
        await running
        await scope["model"].aclose()
        found.append((contents(scope["answer"]["messages"]), backend.complete))
    assert found[0] == found[1]
    assert found[0][0][-1][1] == "It jams."


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_langgraph_s_ready_made_agent_takes_the_node(hermes: Path) -> None:
    log, backend = Log(), AgentBackend(hermes)
    log.may_go_on.set()
    async with chat_model(backend) as model:
        node = StreamragToolNode([log.tool(), ticket_state])
        agent: Any = create_react_agent(model.bind_tools(node), node)
        messages = (await agent.ainvoke({"messages": [HumanMessage(QUESTION)]}))["messages"]
    assert [each.type for each in messages] == ["human", "ai", "tool", "tool", "ai"]
    assert (log.num_starts, messages[2].text) == (1, "".join(LOG))
    assert nothing_left(backend)


async def test_a_wrapper_may_try_a_tool_twice(hermes: Path) -> None:
    async def read_log(log: str) -> AsyncIterator[str]:
        """Read a log."""
        yield next(tries)
        if next(tries, None) is not None:
            raise OSError("no network")

    async def twice(request: Any, execute: Callable[[Any], Any]) -> Any:
        try:
            return await execute(request)
        except OSError:
            return await execute(request)

    tries = iter(["a first line\n", "then fails", "no jam"])
    backend = AgentBackend(hermes, call("read_log", log="printer"), "So.")
    messages = await run(StreamragToolNode([read_log], awrap_tool_call=twice), backend)
    assert messages[2].text == "no jam"
    assert nothing_left(backend)


@pytest.fixture
def repeated_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ids that each answer repeats, as Kimi's models write them."""

    def chunk_of(delta: Any) -> Any:
        chunk = prompt.chunk_of(delta)
        pieces = [{**each, "id": each["id"] and f"functions.tool:{each['index']}"} for each in chunk.tool_call_chunks]
        return chunk.model_copy(update={"tool_call_chunks": pieces})

    monkeypatch.setattr(chat_model_module, "chunk_of", chunk_of)


@pytest.mark.usefixtures("repeated_ids")
async def test_agents_whose_models_repeat_call_ids_share_a_node(hermes: Path) -> None:
    starts = list[str]()

    @tool
    async def read_log(log: str, config: RunnableConfig) -> str:
        """Read a log."""
        starts.append(config["configurable"]["user"])
        await asyncio.sleep(0.05)
        return str(config["configurable"]["user"])

    async def ask(user: str, calls: str) -> list[str]:
        backend = AgentBackend(hermes, calls, calls, "So.")
        async with chat_model(backend) as model:
            graph, config = agent(node, model.bind_tools(node)), {"configurable": {"user": user}}
            state = await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, config)
        return [each.text for each in state["messages"] if each.type == "tool"]

    node, users = StreamragToolNode([read_log]), ["anna", "bert", "carl", "dora"]
    calls = [call("read_log", log=log) for log in ("same", "same", "same", "other")]
    found = await asyncio.gather(*map(ask, users, calls))
    assert found == [[user, user] for user in users]
    assert sorted(starts) == sorted([*users, *users])
    assert not node.steps


async def test_a_tool_runs_once_if_the_graph_makes_a_message_of_its_own(hermes: Path) -> None:
    starts = list[str]()

    @tool
    async def read_log(log: str) -> str:
        """Read a log."""
        starts.append(log)
        return "no jam"

    async def without_text(message: AIMessage) -> AIMessage:
        return AIMessage("", tool_calls=message.tool_calls)

    async with chat_model(AgentBackend(hermes, "I look. " + call("read_log", log="a"), "So.")) as model:
        node = StreamragToolNode([read_log])
        graph = agent(node, model.bind_tools(node) | RunnableLambda(without_text))
        await graph.ainvoke({"messages": [HumanMessage(QUESTION)]})
    assert starts == ["a"]


async def test_a_call_that_the_graph_changes_runs_with_its_new_arguments(hermes: Path) -> None:
    @tool
    async def read_log(log: str) -> str:
        """Read a log."""
        await asyncio.sleep(1000 if log == "printer" else 0)
        return log

    async def change(message: AIMessage) -> AIMessage:
        changed = [{**each, "args": {"log": "scanner"}} for each in message.tool_calls]
        return message.model_copy(update={"tool_calls": changed})

    backend = AgentBackend(hermes, call("read_log", log="printer"), "So.")
    async with chat_model(backend) as model:
        node = StreamragToolNode([read_log])
        graph = agent(node, model.bind_tools(node) | RunnableLambda(change))
        messages = (await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}))["messages"]
    assert messages[2].text == "scanner"
    assert nothing_left(backend)


async def test_a_tool_that_changes_its_arguments_runs_once(hermes: Path) -> None:
    starts = list[Any]()

    async def read_log(lines: dict[str, Any]) -> str:
        starts.append(lines["of"].pop())
        return "no jam"

    schema = {"type": "object", "properties": {"lines": {"type": "object"}}}
    node = StreamragToolNode(
        [StructuredTool(name="read_log", description="Reads.", args_schema=schema, coroutine=read_log)]
    )
    messages = await run(node, AgentBackend(hermes, call("read_log", lines={"of": ["printer"]}), "So."))
    assert starts == ["printer"]
    assert messages[1].tool_calls[0]["args"] == {"lines": {"of": ["printer"]}}  # type: ignore[attr-defined]


async def test_a_tool_of_a_call_that_turns_out_malformed_is_stopped(hermes: Path) -> None:
    log, calls = Log(), call("read_log", log="printer").replace("}}", "}}}")
    old, new = AgentBackend(hermes, calls), AgentBackend(hermes, calls)
    before = await run(ToolNode([read_log]), old, [read_log])
    assert contents(await run(StreamragToolNode([log.tool()]), new)) == contents(before)
    await asyncio.sleep(0)
    assert log.is_closed.is_set() or not log.is_started.is_set()
    assert nothing_left(new)


async def test_steps_of_event_loops_that_have_ended_are_forgotten(hermes: Path) -> None:
    async def ask() -> None:
        async with chat_model(AgentBackend(hermes)) as model:
            graph = agent(node, model.bind_tools(node), checkpointer=InMemorySaver(), interrupt_before=["tools"])
            await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, {"configurable": {"thread_id": "1"}})

    node = StreamragToolNode([read_log, ticket_state])
    await asyncio.to_thread(asyncio.run, ask())
    gc.collect()
    assert not list(node.steps)


@pytest.mark.parametrize("while_", ["the model writes", "the node runs", "a node that starts it runs"])
async def test_a_generator_in_a_thread_ends_when_the_agent_is_stopped(hermes: Path, while_: str) -> None:
    is_stopped, is_closed, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    is_started = asyncio.Event()

    def read_log(log: str) -> Iterator[str]:
        """Read a log."""
        try:
            yield "a line\n"
            loop.call_soon_threadsafe(is_started.set)
            is_stopped.wait()
            yield from ("a line\n" for _ in range(100))
            lines.append("all")
        finally:
            loop.call_soon_threadsafe(is_closed.set)

    lines = list[str]()
    node, backend = StreamragToolNode([read_log]), AgentBackend(hermes, call("read_log", log="x"), "So.")
    bound = list(node.tools_by_name.values()) if while_ == "a node that starts it runs" else node
    if while_ == "the model writes":
        backend.may_end.clear()
    answering = asyncio.create_task(run(node, backend, bound))
    await is_started.wait()
    if while_ == "the node runs":
        await backend.prompt_with("a line")
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    is_stopped.set()
    await is_closed.wait()
    assert not lines


async def test_generators_are_read_wherever_a_tool_has_them(hermes: Path) -> None:
    def in_thread(log: str) -> Iterator[str]:
        """Read a log."""
        yield "not this"

    async def in_pieces(log: str) -> AsyncIterator[str]:
        """Read a log."""
        yield "It "
        yield "jams."

    both = StructuredTool.from_function(func=in_thread, coroutine=in_pieces, name="both")
    alone = StructuredTool.from_function(coroutine=in_pieces, name="alone")  # type: ignore[arg-type]
    calls = call("both", log="x") + call("alone", log="x")
    messages = await run(StreamragToolNode([both, alone]), AgentBackend(hermes, calls, "So."))
    assert [each.text for each in messages[2:4]] == ["It jams.", "It jams."]


@pytest.mark.parametrize("piece", ["打印机在厚纸上卡纸", "QUJDREVGR0g", '{"line":1,"of":"log"},'])
async def test_an_output_without_spaces_is_prefilled_while_it_comes(hermes: Path, piece: str) -> None:
    log, backend = Log(*[piece] * 80), AgentBackend(hermes)
    answering = asyncio.create_task(run(StreamragToolNode([log.tool(), ticket_state]), backend))
    await backend.prompt_with(piece * 20)
    log.may_go_on.set()
    await answering
    prefilled, whole = [each.token_ids for each in backend.prompts[1]], backend.complete[1]
    assert all(whole[: len(each) - 32] == each[:-32] for each in prefilled)


def test_langgraph_s_node_has_the_parts_that_ours_relies_on() -> None:
    execute = inspect.signature(ToolNode._execute_tool_async)
    assert list(execute.parameters) == ["self", "request", "input_type", "config"]
    assert not any(astuple(ToolNode([read_log])._injected_args["read_log"]))


class WatchedVllm(VllmBackend):
    """An engine that signals what it has prefilled, and keeps its records."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.has_prefilled = asyncio.Event()
        self.records: list[RequestRecord] = []

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def watched() -> AsyncIterator[Prompt]:
            async for each in prompts:
                yield each

        async with aclosing(super().generate(watched(), params)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, AnswerChunk) and event.record is not None:
                    self.records.append(event.record)
                if isinstance(event, Prefilled):
                    self.has_prefilled.set()
                yield event


@pytest.mark.engine
async def test_a_real_engine_answers_as_with_langgraph_s_node(tmp_path: Path) -> None:
    @tool
    async def read_log(log: Literal["printer"]) -> str:
        """Read a log."""
        return "".join(LOG)

    async def write_log(log: str) -> AsyncIterator[str]:
        for line in LOG:
            yield line
            if LOG.index(line) % 15 == 14:
                backend.has_prefilled.clear()
                await backend.has_prefilled.wait()

    folder = make_tool_llama(tmp_path / "model", max_model_len=4096)
    writes = read_log.model_copy(update={"func": write_log, "coroutine": None})
    backend = WatchedVllm(folder, engine_args={"dtype": "float32"}, kv_cache_bytes=1 << 28)
    pipeline = Pipeline(ScriptedSource([Append(TICKET)]), backend)
    found: dict[str, Any] = {}
    async with StreamragChatModel(pipeline=pipeline, tool_parser="hermes", max_tokens=200) as model:
        ours: Any = StreamragToolNode([writes])
        for node, bound in ((ToolNode([read_log]), [read_log]), (ours, ours)):
            await backend.reset_prefix_cache()
            first = model.bind_tools(bound, tool_choice="read_log", strict=True)
            later = model.bind_tools(bound, strict=True)

            async def step(state: MessagesState, first: Any = first, later: Any = later) -> dict[str, Any]:
                messages = state["messages"]
                return {"messages": [await (first if len(messages) == 1 else later).ainvoke(messages)]}

            graph = StateGraph(MessagesState).add_node("model", step).add_node("tools", node).add_edge(START, "model")
            graph.add_edge("tools", "model").add_conditional_edges("model", tools_condition)
            messages = (await graph.compile().ainvoke({"messages": [HumanMessage(QUESTION)]}))["messages"]
            assert messages[2].text == "".join(LOG)
            usage = [each.usage_metadata for each in messages if isinstance(each, AIMessage)]
            found[type(node).__name__] = contents(messages), usage
    assert found["StreamragToolNode"] == found["ToolNode"]
    *_, before, _, after = [record.num_computed for record in backend.records]
    assert after < before / 2  # the rest was computed while the tool wrote
