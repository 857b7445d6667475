"""What does an agent gain from tools that start while the model writes, and are read while they write?

    python -m studies.agents.run [--only simulated | real] [--model FOLDER] [--rounds N] [--json FILE]

An agent of LangGraph calls tools in its first step, all in one message, and answers in the second. The same agent has
LangGraph's `ToolNode`, then `StreamragToolNode`, in turns, each with an empty prefix cache. The tools only sleep, and
return or yield text of the documentation. What the model says is written down, token by token; the engine computes the
prompts, and as many tokens. The bound is the same agent whose tools have no output to read.

The real engine has the model of `make demo`, in float32, with a chat template for tools. The simulated one is two H200
with Llama 3.1 8B, for one agent and for eight that begin at the same time, with ten times the text.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, message_chunk_to_message
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from rich.console import Console
from rich.table import Table

from streamrag import Pipeline, PromptTemplate, VllmBackend
from streamrag.adapters.langchain import StreamragChatModel, StreamragToolNode
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prompt, SamplingParams, only
from streamrag.demo.demo_folder import docs_folder, written_pages
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.clock import Clock, monotonic
from streamrag.testing import ScriptedSource, make_demo_model
from studies.results_file import write_results
from studies.sessions.simulated_backend import SimulatedBackend, simulated_on

MAX_MODEL_LEN = 8_192
NUM_AGENTS = 8
PROFILE, SIMULATED_LEN = "h200-llama8b-tp2", 65_536
ANSWER = " ".join(["The printer jams on thick paper."] * 5)
TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools

<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n' }}</tools>

For each call, return a JSON object with its name and arguments within <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As those of Qwen 2.5 and Hermes, with the turns of SmolLM2."""
NO_DOCUMENTS = PromptTemplate(system="", before_context="", no_context="", after_context="{question}")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Tool:
    """A tool that takes some time, and returns a text of some tokens, or yields it line by line."""

    name: str
    seconds: float
    num_tokens: int
    is_log: bool = False


QUICK, SEARCH, LOG = Tool("ticket_state", 0.3, 50), Tool("search", 2.0, 500), Tool("read_log", 6.0, 2_000, is_log=True)
CASES = {
    "one quick tool": (QUICK,),
    "two that return": (QUICK, SEARCH),
    "two, one writes for 6 s": (QUICK, LOG),
    "the same, its call first": (LOG, QUICK),
    "three, one writes for 6 s": (QUICK, SEARCH, LOG),
}
WAYS = ("ToolNode", "StreamragToolNode", "bound")


@dataclass(frozen=True)
class Row:
    """One question to an agent."""

    engine: str
    case: str
    num_agents: int
    way: str
    number: int
    num_prompt_tokens: int
    """Tokens of the second step's prompt."""
    first_s: float
    """Seconds from the question to the first token of the answer."""
    last_s: float
    """Seconds from the question to its last token."""


class WrittenAnswers:
    """An engine that computes each prompt, and as many tokens as the answer that is written down for it."""

    def __init__(self, backend: Any, clock: Clock) -> None:
        self.model: ModelInfo = backend.model
        self.clock = clock
        self.calls: dict[str, str] = {}
        """What the first step says to each question."""
        self.first_s: dict[str, float] = {}
        """Time of the answer's first token, by question."""
        self._backend = backend

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        complete: list[Prompt] = []

        async def watched() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                complete.extend([prompt] if prompt.is_complete else [])
                yield prompt

        encode, decode = self.model.tokenizer.encode, self.model.tokenizer.decode
        written: list[int] | None = None
        params = replace(params, max_tokens=256, ignore_eos=True, extra={})
        async with aclosing(self._backend.generate(watched(), params)) as events:
            async for event in events:
                if not isinstance(event, AnswerChunk):
                    yield event
                    continue
                if written is None:
                    text = decode(complete[0].token_ids)
                    question = next(each for each in self.calls if each in text)
                    is_answer = "<tool_response>" in text
                    written = encode(ANSWER if is_answer else self.calls[question])
                    if is_answer:
                        self.first_s[question] = self.clock()
                now, written = written[: len(event.token_ids)], written[len(event.token_ids) :]
                yield AnswerChunk(decode(now), tuple(now), None if written else "stop")
                if not written:
                    return


def make_tool(each: Tool, text: str, way: str) -> BaseTool:
    """Return a LangChain tool that yields its lines in equal steps, or as an ordinary one returns them at its end."""
    lines = text.splitlines(keepends=True)

    @tool(each.name, description=f"Call {each.name}.")
    async def returns(about: str) -> str:
        await asyncio.sleep(each.seconds)
        return text if way != "bound" else ""

    @tool(each.name, description=f"Call {each.name}.")
    async def yields(about: str) -> AsyncIterator[str]:
        for line in lines:
            await asyncio.sleep(each.seconds / len(lines))
            yield line

    return yields if each.is_log and way == "StreamragToolNode" else returns


def agent(model: StreamragChatModel, tools: Sequence[BaseTool], way: str) -> Any:
    """Return the usual loop of a model and its tools."""
    node: Any = StreamragToolNode(tools) if way != "ToolNode" else ToolNode(tools)
    bound = model.bind_tools(tools if way == "ToolNode" else node)

    async def step(state: MessagesState) -> dict[str, Any]:
        chunks = [chunk async for chunk in bound.astream(state["messages"])]  # `ainvoke` joins them in a thread
        return {"messages": [message_chunk_to_message(sum(chunks[1:], chunks[0]))]}

    async def goes_on(state: MessagesState) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", ()) else END

    graph = StateGraph(MessagesState).add_node("model", step).add_node("tools", node).add_edge(START, "model")
    return graph.add_edge("tools", "model").add_conditional_edges("model", goes_on, ["tools", END]).compile()


class Study:
    """The agents of one engine."""

    def __init__(self, name: str, backend: Any, reset: Callable[[], Awaitable[object]], clock: Clock, scale: float):
        self._name = name
        self._backend = WrittenAnswers(backend, clock)
        self._reset = reset
        self._scale = scale
        self._lines = [line + "\n" for page in written_pages(docs_folder()) for line in page.read_text().splitlines()]

    async def measure(self, cases: Sequence[str], num_agents: int, num_rounds: int) -> list[Row]:
        """Ask in each way, in turns. The first question is not counted: the first steps of an engine are slow."""
        rows: list[Row] = []
        pipeline = Pipeline(ScriptedSource([]), self._backend, template=NO_DOCUMENTS, owns_backend=False)
        async with StreamragChatModel(pipeline=pipeline, tool_parser="hermes") as model:
            await self._ask(model, "one quick tool", 1, WAYS[1], -1)
            for case in cases:
                for number in range(num_rounds):
                    for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                        await asyncio.sleep(0.5)  # until the engine has freed the last request
                        assert await self._reset()
                        rows += await self._ask(model, case, num_agents, way, number)
                print_rows([row for row in rows if row.case == case])
        return rows

    async def _ask(self, model: StreamragChatModel, case: str, num_agents: int, way: str, number: int) -> list[Row]:
        begin_s = self._backend.clock()
        asking = (self._ask_one(model, case, way, number * num_agents + i, begin_s) for i in range(num_agents))
        rows = await asyncio.gather(*asking)
        return [replace(row, num_agents=num_agents) for row in rows]

    async def _ask_one(self, model: StreamragChatModel, case: str, way: str, number: int, begin_s: float) -> Row:
        question = f"Why does printer number {number:04} jam?"
        calls = [{"name": each.name, "arguments": {"about": "printer"}} for each in CASES[case]]
        self._backend.calls[question] = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        tools = [make_tool(each, self._text(number + i, each.num_tokens), way) for i, each in enumerate(CASES[case])]
        state = await agent(model, tools, way).ainvoke({"messages": [HumanMessage(question)]})
        last = state["messages"][-1]
        assert last.text == ANSWER, last
        first_s, last_s = self._backend.first_s[question] - begin_s, self._backend.clock() - begin_s
        return Row(self._name, case, 1, way, number, last.usage_metadata["input_tokens"], first_s, last_s)

    def _text(self, number: int, num_tokens: int) -> str:
        """Return lines of the documentation, from another place for each question, with about this many tokens."""
        start, text, num = number * 997 % len(self._lines), list[str](), 0
        while num < num_tokens * self._scale:
            text.append(self._lines[(start + len(text)) % len(self._lines)])
            num += len(self._backend.model.tokenizer.encode(text[-1]))
        return "".join(text)


def summarize(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the medians of each case and way, and those of the ratios to `ToolNode`, question by question."""
    for engine, case, num_agents in dict.fromkeys((row.engine, row.case, row.num_agents) for row in rows):
        of_case = [r for r in rows if (r.engine, r.case, r.num_agents) == (engine, case, num_agents)]
        before = {row.number: row for row in of_case if row.way == WAYS[0]}
        for way in WAYS:
            of_way = [row for row in of_case if row.way == way]
            names = ("first_s", "last_s", "num_prompt_tokens")
            ratios = [
                (before[row.number].first_s / row.first_s, before[row.number].last_s / row.last_s) for row in of_way
            ]
            yield {
                "engine": engine,
                "case": case,
                "num_agents": num_agents,
                "way": way,
                "num": len(of_way),
                **{name: statistics.median(getattr(row, name) for row in of_way) for name in names},
                **{f"{name}_ratio": statistics.median(each[i] for each in ratios) for i, name in enumerate(names[:2])},
            }


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of the medians."""
    table = Table("engine", "agents", "tools", "way", "prompt", "first token, s", "last token, s")
    for each in summarize(rows):
        times = (f"{each[name]:.2f}, {each[f'{name}_ratio']:.2f}x" for name in ("first_s", "last_s"))
        about = (
            each["engine"],
            str(each["num_agents"]),
            each["case"],
            each["way"],
            f"{each['num_prompt_tokens']:,.0f}",
        )
        table.add_row(*about, *times)
    console.print(table)


def make_model(folder: Path, model: Path | None) -> Path:
    """Return the demo's model in `folder`, with a chat template that renders tools."""
    made = make_demo_model(folder / "model") if model is None else folder / "model"
    if model is not None:
        made.mkdir()
        for path in model.iterdir():
            (made / path.name).symlink_to(path)
    path = made / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": TEMPLATE}
    path.unlink()
    path.write_text(json.dumps(settings))
    return made


async def measure_simulated(folder: Path, cases: Sequence[str], num_rounds: int) -> list[Row]:
    """Measure on a simulated engine, in virtual time."""
    async with simulated_on(load_profile(PROFILE), SIMULATED_LEN) as (engine, client):

        async def reset() -> bool:
            return bool(engine.scheduler.reset_prefix_cache())

        tokenizer = HuggingFaceTokenizer(folder)
        backend = SimulatedBackend(client, ModelInfo("simulated", tokenizer, SIMULATED_LEN))
        study = Study("H200, simulated", backend, reset, asyncio.get_running_loop().time, scale=5)
        rows = await study.measure(cases, 1, num_rounds)
        return rows + await study.measure(cases, NUM_AGENTS, 1)


async def measure_real(folder: Path, cases: Sequence[str], num_rounds: int) -> list[Row]:
    """Measure on a real engine on this machine."""
    backend = VllmBackend(folder, max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"})
    await backend.start(console.print)
    try:
        async for _ in backend.generate(
            only(Prompt(tuple(range(100, 1_100)), is_complete=True)), SamplingParams(max_tokens=8)
        ):
            pass  # the first step is slow
        study = Study("two cores", backend, backend.reset_prefix_cache, monotonic, scale=0.5)
        return await study.measure(cases, 1, num_rounds)
    finally:
        await backend.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated", "real"), help="both by default")
    parser.add_argument("--model", type=Path, help="that of `make demo`; made anew by default")
    parser.add_argument("--rounds", type=int, default=5, help="questions for each case; 5 by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    parser.add_argument("--case", choices=CASES, action="append", help="all by default")
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), arguments.model)
        rows = run_virtual(measure_simulated(model, cases, 1)) if arguments.only != "real" else []
        if arguments.only != "simulated":
            rows += asyncio.run(measure_real(model, cases, arguments.rounds))
    if arguments.json:
        write_results(arguments.json, rows, command="make -C bench agents", summary=list(summarize(rows)))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
