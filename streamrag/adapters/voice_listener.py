"""A listener to one conversation by voice: retrieval begins while the user speaks, the answer when the turn ends."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from streamrag.core import TokenUsage, Turn
from streamrag.errors import ConfigurationError
from streamrag.open_questions import ListenOptions, OpenQuestion, content_words
from streamrag.pipeline import Pipeline
from streamrag.query.answer_stream import AnswerStream
from streamrag.query.options import QueryOptions

NOTHING_TO_ANSWER = (
    "the conversation has no message of its user, and a pipeline answers questions: let the agent speak a text of its "
    "own first, with session.say(...) of LiveKit or a TTSSpeakFrame of Pipecat"
)
NO_TOOLS = "a pipeline calls no tools, and the agent has {}: give it none, or put what they look up into the source"


class VoiceListener:
    """A listener to one conversation. It has at most one open question, which the next answer commits.

    Messages are pairs of role and text, oldest first. A question belongs to the messages before it: if these change, as
    when the user interrupts an answer, a new question takes its place.

    options: those of `Pipeline.listen`, for each question.

    :raises ConfigurationError: an option cannot work.
    """

    def __init__(self, pipeline: Pipeline, options: ListenOptions) -> None:
        pipeline.listen(**options)  # raises for options that cannot work
        self._pipeline = pipeline
        self._options = options
        self._question: OpenQuestion | None = None
        self._committed = ""
        self._conversation = QueryOptions()
        self._lock = asyncio.Lock()  # first come, first served: a transcript that came before a commit is heard before

    async def hear(self, text: str, messages: Iterable[tuple[str, str]], *, is_final: bool = False) -> None:
        """Say what the user has said so far in this turn, and whether the recognizer may still change it."""
        if not text.strip():
            return
        text, conversation = parse_messages([*messages, ("user", text)])
        async with self._lock:
            if not self._is_committed(text, conversation):
                question = await self._open(conversation)
                await question.partial(text, is_final=is_final)

    @asynccontextmanager
    async def answer(
        self, messages: Iterable[tuple[str, str]], tools: Sequence[object] = ()
    ) -> AsyncIterator[AnswerStream]:
        """Return a block with the answer to the user's last message. Leaving it stops the answer; tools are refused."""
        if tools:
            raise ConfigurationError(NO_TOOLS.format(len(tools)))
        text, conversation = parse_messages(messages)
        async with self._lock:
            question = await self._open(conversation)
            self._question, self._committed = None, text
        async with question:
            yield question.commit(text)

    async def aclose(self) -> None:
        """Stop what has begun for a question that is not committed. The next transcript begins another one."""
        async with self._lock:
            await self._drop()

    def _is_committed(self, text: str, conversation: QueryOptions) -> bool:
        """Whether the last committed question has the same words: recognizers repeat those of a predicted turn."""
        is_same = bool(self._committed) and conversation == self._conversation
        return is_same and content_words(text) == content_words(self._committed)

    async def _open(self, conversation: QueryOptions) -> OpenQuestion:
        """Return the open question of this conversation, or a new one, which replaces that of another conversation."""
        if self._question is None or conversation != self._conversation:
            await self._drop()
            options: ListenOptions = {**self._options, **conversation}
            self._question, self._committed, self._conversation = self._pipeline.listen(**options), "", conversation
        return self._question

    async def _drop(self) -> None:
        """Stop the open question, if there is one."""
        if self._question is not None:
            question, self._question = self._question, None
            await question.aclose()


def parse_messages(messages: Iterable[tuple[str, str]]) -> tuple[str, QueryOptions]:
    """Return the user's last message as the question, and the others as options: system texts, joined, and history.

    >>> parse_messages([("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Why?")])[0]
    'Why?'
    """
    parts = [(role, text) for role, text in messages if text.strip()]
    system = "\n\n".join(text for role, text in parts if role in ("system", "developer"))
    turns = [Turn(role, text) for role, text in parts if role in ("user", "assistant")]  # type: ignore[arg-type]
    last = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=None)
    if last is None:
        raise ConfigurationError(NOTHING_TO_ANSWER)
    question = turns.pop(last)
    return question.text, {"history": turns, **({"system": system} if system else {})}


def token_counts(usage: TokenUsage) -> dict[str, int | None]:
    """Return the numbers of tokens by the names of OpenAI, which the frameworks use; an empty dict if unknown."""
    counts = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_tokens,
    }
    return counts if usage.num_tokens is not None else {}
