"""A step of an agent: an answer that calls tools, what these write, and the prompt of the next step.

    answer       "I look." call 1 │ call 2 │
    tool 1                        ╰─ starts ─ "10:02 ok" ─ "10:03 jam" ─────────── ends
    tool 2                                 ╰─ starts ─────────── ends
    next prompt                            ╰─ calls, tool 1 so far ──────────────┴─ tool 2 ┴─ the chat model's call

The next step's chat model makes its prompt itself, from the final messages. What is prefilled here is only a beginning
of that prompt, which the engine finds in its prefix cache. So it changes no token.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCall, ToolMessage
from langchain_core.messages.ai import add_ai_message_chunks

from streamrag.core import Chunk, Prompt, SamplingParams, common_prefix_len
from streamrag.core.retrieval import closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.query.options import Query
from streamrag.query.prompts import new_assembler
from streamrag.support.messages import message_of, type_name
from streamrag.support.tasks import end_or_leave

if TYPE_CHECKING:
    from streamrag.adapters.langchain.chat_model import StreamragChatModel
    from streamrag.adapters.langchain.tool_node import StreamragToolNode

log = logging.getLogger("streamrag.langchain")

NAME = "tools of an agent"
MIN_CHARS = 256
"""New characters of a tool's output before the prompt is prefilled again, as in `from_tokens`."""
MAX_CHARS = 400_000
"""Most characters of one output that a generator writes, as in `from_tokens`."""
CUT_OFF = f"\n(cut off: the tool wrote more than {MAX_CHARS:,} characters)"
KEEP_S = 10.0
"""Seconds that a started tool may run before the graph reaches the node that waits for it: a graph may end before."""
PAUSE = 4
"""Pause between two prompts, in durations of making the last one: the tokenizer shares the engine's processors."""
MAX_WORD = 64
"""Characters of a last word that may still grow. More of one, as of Chinese or encoded data, counts as complete."""
LAST_WORD = re.compile(r"\W*\w*\Z")
"""The last word of a text, with what divides it from the word before."""
ENDINGS = ("\n#", " a")
"""Two continuations of an output. The tokens that both prompts begin with are those of any continuation."""

OUTPUT: ContextVar["ToolOutput | None"] = ContextVar("streamrag tool output", default=None)
"""The output of the tool that is running."""


class ToolOutput:
    """The output of one call of a tool, while the tool runs and afterwards."""

    def __init__(self, call: ToolCall, report: Callable[[], None] = lambda: None) -> None:
        self.call = call
        self.num_chars = 0
        self.result: Any = None
        """The tool node's result of the call, a `ToolMessage` or something else; None until the tool has ended."""
        self.started: asyncio.Task[Any] | None = None
        """The tool, if it was started before the graph reached the tool node."""
        self.is_taken = False
        """Whether the tool node has run the tool, or waits for it."""
        self._num_reported = 0
        self._is_stopped = False
        self._pieces: list[str] = []
        self._report = report

    @classmethod
    def claim(cls, name: str) -> "ToolOutput":
        """Return the output of the running tool for its generator; another one for a tool that this tool calls."""
        output = OUTPUT.get()
        if output is None or output.call["name"] != name:
            return cls(ToolCall(name=name, args={}, id=None))
        OUTPUT.set(None)
        return output

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def write(self, piece: Any) -> bool:
        """Add a piece; return whether more may follow: not beyond `MAX_CHARS`, nor once the tool was stopped.

        :raises TypeError: the piece has no text.
        """
        text = piece if isinstance(piece, str) else getattr(piece, "text", None)
        if not isinstance(text, str):
            name = self.call["name"]
            raise TypeError(f"the tool {name} wrote {type_name(piece)}, and not a str or an object with a text")
        num_left = MAX_CHARS - self.num_chars
        self._pieces.append(text if len(text) <= num_left else text[:num_left] + CUT_OFF)
        self.num_chars += len(text)
        if self.num_chars >= self._num_reported + MIN_CHARS:
            self._num_reported = self.num_chars
            self._report()
        return self.num_chars <= MAX_CHARS and not self._is_stopped

    def end(self, result: Any) -> None:
        """Set the result."""
        self.result = result
        self._report()

    def stop(self) -> None:
        """Stop the tool, if it was started early and has not ended."""
        self._is_stopped = True  # a thread ends at its next piece
        if self.started is not None:
            self.started.cancel()

    def message(self) -> ToolMessage:
        """Return the result if there is one, else the text so far, without its last word, which may still grow."""
        if isinstance(self.result, ToolMessage):
            return self.result
        text = self.text
        text = text[:-MAX_WORD] + LAST_WORD.sub("", text[-MAX_WORD:])
        return ToolMessage(text, name=self.call["name"], tool_call_id=self.call["id"])


class AgentStep:
    """A step of an agent. Use it as an async context manager around the answer; an error stops the started tools.

    node: the tool node, which starts tools, and has the steps whose tools have not all ended.
    model: the chat model that answers, and will be called for the next step with the same options.
    messages: the messages that it answers.
    parse: the model's function that returns the query and its options for messages.
    options: the options of the query of this step.
    message_id: the id of the answer's message. Those of its calls are not always unique: some models write their own.
    """

    def __init__(
        self,
        node: "StreamragToolNode",
        model: "StreamragChatModel",
        messages: Sequence[BaseMessage],
        parse: Callable[[Sequence[BaseMessage]], tuple[str, dict[str, Any]]],
        options: Mapping[str, Any],
        message_id: str,
    ) -> None:
        self.outputs: dict[str, ToolOutput] = {}
        """The outputs by the ids of the calls, in their order."""
        self.loop = asyncio.get_running_loop()
        self._node = node
        self._model = model
        self._messages = list(messages)
        self._parse = parse
        self._is_prefilled = options.get("overlap", model.pipeline.overlap) is not False
        self._message_id = message_id
        self._conversation_id = options.get("conversation_id", "")
        self._chunks: list[AIMessageChunk] = []
        self._open_call: dict[str, Any] = {}
        self._passages: tuple[Chunk, ...] = ()
        self._num_running = 0
        self._prefilling: asyncio.Task[None] | None = None
        self._wake: Callable[[], object] = lambda: None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None and self._chunks:
            self._finish_answer()
        else:
            tasks = [output.started for output in self.outputs.values() if output.started is not None]
            self._forget()
            await end_all(tasks)

    def add(self, chunk: AIMessageChunk) -> None:
        """Add a piece of the answer. Start the tool of a call whose arguments are now a whole JSON object, because the
        beginning of one is none."""
        chunk.id = self._message_id
        self._chunks.append(chunk)
        for piece in chunk.tool_call_chunks:
            if piece["id"]:
                self._open_call = {"id": piece["id"], "name": piece["name"], "args": ""}
            if self._open_call:
                self._open_call["args"] += piece["args"] or ""
            if self._open_call.get("args", "").rstrip().endswith("}"):
                with suppress(ValueError, RecursionError):
                    args = json.loads(self._open_call["args"])
                    id, name, self._open_call = self._open_call["id"], self._open_call["name"], {}
                    call = ToolCall(name=name, args=args, id=id, type="tool_call")
                    if id not in self.outputs:
                        output = self.outputs[id] = ToolOutput(call, self._report)
                        output.started = self._node.start_early(output)

    def _finish_answer(self) -> None:
        """Take over the calls and passages of the whole answer, and wait `KEEP_S` for the tool node."""
        answer = add_ai_message_chunks(*self._chunks)
        self._chunks = []
        calls = {call["id"]: call for call in answer.tool_calls if call["id"]}
        started = self.outputs
        self.outputs = {id: started.get(id) or ToolOutput(call, self._report) for id, call in calls.items()}
        for id in started.keys() - calls.keys():  # more came behind the arguments, and so there is no such call
            started[id].stop()
        citations = answer.response_metadata.get("citations", ())
        self._passages = tuple(Chunk(c["text"], c["uri"], c["title"], c["passage"], c["score"]) for c in citations)
        self._messages.append(AIMessage(answer.content, tool_calls=answer.tool_calls))
        if self.outputs:
            self._node.steps[self._message_id] = self
            self.loop.call_later(KEEP_S, self._forget)

    def _forget(self) -> None:
        """Cancel the tools that no tool node has taken over, and remove the step from the node."""
        for output in self.outputs.values():
            if not output.is_taken:
                output.stop()
        self._node.steps.pop(self._message_id, None)

    @asynccontextmanager
    async def run(self, call: ToolCall) -> AsyncGenerator[ToolOutput, None]:
        """Yield the output of a call whose tool runs in the block; the tool may have been started for this call.

        Meanwhile, the next step's prompt is prefilled, until no tool of this step runs. What is computed of it stays in
        the prefix cache.
        """
        output = self.outputs[call["id"] or ""]
        is_changed = (call["name"], call["args"]) != (output.call["name"], output.call["args"])
        if is_changed and not output.is_taken:
            output.stop()  # the tool was started for other arguments
        if is_changed or output.is_taken:
            output = self.outputs[call["id"] or ""] = ToolOutput(call, self._report)
        output.is_taken = True
        if all(each.is_taken for each in self.outputs.values()):
            self._forget()
        self._num_running += 1
        if self._prefilling is None and self._is_prefilled:
            self._prefilling = asyncio.create_task(self._prefill(), name="streamrag next step")
        try:
            yield output
        finally:
            self._num_running -= 1
            if self._num_running == 0 and self._prefilling is not None:
                prefilling, self._prefilling = self._prefilling, None
                await end_or_leave(prefilling, "the prefill of an agent's next step")

    async def _prefill(self) -> None:
        """Prefill until cancelled. A failure is only logged: the next step meets it itself, if it lasts."""
        try:
            await self._model.portal.arun(self._send_prompts)
        except Exception as error:
            log.info("the next step of an agent is not prefilled: %s", message_of(error))

    async def _send_prompts(self) -> None:
        """Send the prompts so far to the engine, in the pipeline's event loop; none if that is full."""
        pipeline = self._model.pipeline
        if pipeline.num_queries >= pipeline.max_concurrent_queries:
            return
        async with (
            aclosing(self._prompts()) as prompts,
            closing(pipeline.backend.generate(prompts, SamplingParams(max_tokens=1))) as events,
        ):
            async for _ in events:
                pass

    def _report(self) -> None:
        """Tell the prefill, which may run in another event loop, that an output has changed."""
        with suppress(RuntimeError):  # that loop has ended
            self._wake()

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield the next step's prompt so far, as partial, each time that a tool has written more. Never ends."""
        loop, has_news = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(has_news.set)
        tokenizer = self._model.pipeline.backend.model.tokenizer
        previous, num_before = tuple[int, ...](), (0, 0)
        while True:
            has_news.clear()
            begin_s, known = loop.time(), self._known_outputs()
            num_known = len(known), known[-1].num_chars
            if num_known != num_before:
                num_before = num_known
                token_ids = await in_thread(tokenizer, partial(self._token_ids, known), is_background=True)
                if (num_shared := common_prefix_len(previous, token_ids)) < len(token_ids):
                    yield Prompt(token_ids, num_shared, source_name=NAME, conversation_id=self._conversation_id)
                    previous = token_ids
                await asyncio.sleep(PAUSE * (loop.time() - begin_s))
            await has_news.wait()

    def _known_outputs(self) -> list[ToolOutput]:
        """Return the outputs up to the first whose message is not known: its tool runs, or gave LangGraph a command."""
        known = list[ToolOutput]()
        for output in self.outputs.values():
            known.append(output)
            if not isinstance(output.result, ToolMessage):
                break
        return known

    def _token_ids(self, known: Sequence[ToolOutput]) -> tuple[int, ...]:
        """Return the tokens that the next step's prompt begins with, whatever the last output goes on with."""
        *before, last = [output.message() for output in known]
        ways = [last.model_copy(update={"content": f"{last.content}{ending}"}) for ending in ENDINGS]
        first, second = (self._complete([*self._messages, *before, way]) for way in ways)
        return first[: common_prefix_len(first, second)]

    def _complete(self, messages: Sequence[BaseMessage]) -> tuple[int, ...]:
        """Return the token ids of the complete prompt for these messages, with the passages of this step's."""
        text, options = self._parse(messages)
        template = options["template"]
        if "system" in options:
            template = replace(template, system=options["system"])
        kept = {name: options[name] for name in ("params", "history", "max_context_tokens") if name in options}
        query = Query(text, template, reserve_fraction=0.0, **kept)
        assembler = new_assembler(query, self._model.pipeline.backend.model)
        return assembler.assemble(self._passages, is_complete=True).prompt.token_ids


async def end_all(tasks: "Collection[asyncio.Task[Any]]") -> None:
    """Stop the tools of an agent, and wait for their end."""
    await asyncio.gather(*(end_or_leave(task, "a tool of an agent that was stopped") for task in tasks))
