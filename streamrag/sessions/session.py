"""A session: data that streams in, and whoever asks about it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from streamrag.core import Backend, Chunk, SamplingParams, Source
from streamrag.errors import ConfigurationError, PipelineClosedError, PromptTooLongError
from streamrag.handle import AnswerStream, Emit, EventStream, StartQuery
from streamrag.kinds import is_number, is_whole, plain_text, short
from streamrag.modes import PromptTemplate
from streamrag.retrieving import checked_chunk
from streamrag.sessions.answering import again, answered, exact_key
from streamrag.sessions.buffer import Buffer
from streamrag.sessions.following import append_all
from streamrag.sessions.ingestion import CLOSED, Ingestion, Snapshot
from streamrag.sessions.prompts import SessionPrompts, session_template
from streamrag.sessions.running import Running
from streamrag.sessions.state import SessionState
from streamrag.sessions.window import Window
from streamrag.tasks import run_regardless
from streamrag.telemetry import Answer, Answered, TokensGenerated
from streamrag.tokenizing import in_thread

if TYPE_CHECKING:
    from streamrag.sessions.watch import Watch
    from streamrag.sessions.watching import Watches

MAX_ANSWERS = 1024
"""Greedy answers that are kept, for whoever asks the same of the same data."""


class Session:
    """Context that streams in, kept computed, and any number of questions about it at once.

    Made by `Pipeline.session`, and used as an async context manager. An answer is the model's to the very text of its
    version: what is computed ahead makes it fast, never other.

    window_tokens: most tokens of data in the prompt; the oldest go for new ones.
    slide_share: share of the window that goes at a time. The rest is then computed anew, in the background, while
        questions are answered from the version before.
    max_waiting, max_waiting_characters: data that waits while the engine computes; beyond it the oldest is dropped.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        system: str | None = None,
        template: PromptTemplate | None = None,
        window_tokens: int | None = None,
        slide_share: float = 0.5,
        max_waiting: int = 4096,
        max_waiting_characters: int = 4_000_000,
        name: str = "session",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for option, value in (
            ("window_tokens", 1 if window_tokens is None else window_tokens),
            ("max_waiting", max_waiting),
            ("max_waiting_characters", max_waiting_characters),
        ):
            if not is_whole(value) or value < 1:
                raise ConfigurationError(f"{option}={short(value)} must be a whole number, at least 1")
        if not is_number(slide_share) or not 0 < slide_share < 1:
            raise ConfigurationError(f"slide_share={short(slide_share)} must be a share between 0 and 1")
        self._backend = backend
        self._template = session_template(template, system)
        self._window_tokens = window_tokens
        self._slide_share = float(slide_share)
        self._name = name
        self._clock = clock
        self._buffer = Buffer(max_waiting, max_waiting_characters)
        self._running = Running(name)
        self._answers: dict[tuple[str, str], Answer] = {}
        """To the version that stands, by question and parameters."""
        self._is_closed = False
        self._watches: Watches | None = None
        self._prompts: SessionPrompts
        self._ingestion: Ingestion | None = None

    # --------------------------------------------------------------------------------------------- starting and ending

    async def start(self) -> None:
        """Have the system text computed. Called by the context manager.

        :raises PromptTooLongError: window and system text do not fit the model's length.
        :raises PipelineClosedError: the session was closed, also meanwhile.
        :raises ConfigurationError: it has been started before.
        """
        self._check_not_closed()
        model = self._backend.model
        self._prompts = await in_thread(model.tokenizer, partial(SessionPrompts, model, self._template))
        room = model.max_model_len - len(self._prompts.head)
        window_tokens = self._window_tokens or max(room * 3 // 4, 1)
        if window_tokens >= room:
            raise PromptTooLongError(
                f"window_tokens={window_tokens} and {len(self._prompts.head)} tokens of system text leave no room "
                f"for a question: the model's length is {model.max_model_len}"
            )
        self._check_not_closed()
        if self._ingestion is not None:
            raise ConfigurationError("the session has been started before: open another one")
        window = Window(window_tokens, self._slide_share)
        self._ingestion = Ingestion(self._backend, self._name, self._buffer, window, self._prompts)
        self._ingestion.start(self._data_updated)

    async def aclose(self) -> None:
        """End all questions and watches, and free the session's KV."""
        self._is_closed = True
        await run_regardless(self._close(), "streamrag session closes")

    async def _close(self) -> None:
        if self._watches is not None:
            await self._watches.aclose()
        await self._running.aclose()
        if self._ingestion is not None:
            await self._ingestion.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def state(self) -> SessionState:
        """How it stands."""
        ingestion = self._started()
        return SessionState(
            version=ingestion.ready.version,
            num_appended=self._buffer.num_appended,
            num_waiting=len(self._buffer),
            num_dropped=self._buffer.num_dropped,
            num_slid=ingestion.window.num_slid,
            num_tokens=len(ingestion.ready.token_ids),
            num_frozen_tokens=len(self._prompts.head),
            window_tokens=ingestion.window.max_tokens,
            num_failures=ingestion.num_failures,
        )

    # ------------------------------------------------------------------------------------------------------------ data

    async def append(self, data: Chunk | str) -> int:
        """Add data at the end; returns at once with its version, which is how many chunks have been appended.

        If more comes than the engine can take in, the oldest that waits is dropped: see `state`.

        :raises PipelineClosedError: the session was closed.
        """
        self.check_open()
        return self._started().append(checked_chunk(Chunk(data, "") if isinstance(data, str) else data))

    async def follow(self, source: Source, query: str = "") -> int:
        """Append all that a source yields, until it ends; the newest version. Of an update, what is new is appended.

        :raises SourceError: the source failed; what came before stays.
        :raises PipelineClosedError: the session was closed.
        """
        self.check_open()
        await self._running.begin(partial(append_all, source, query, self.append), "source")
        return self._buffer.num_appended

    async def versions(self) -> AsyncGenerator[int, None]:
        """The version that questions are answered from, whenever it has changed; a slow reader gets the newest.

        :raises PipelineClosedError: the session was closed.
        """
        version = self._started().ready.version
        while True:
            version = (await self._at_least(version + 1)).version
            yield version

    def _data_updated(self) -> None:
        self._answers.clear()
        if self._watches is not None:
            self._watches.data_updated()

    def _started(self) -> Ingestion:
        if self._ingestion is None:
            raise ConfigurationError("the session has not been started: use `async with pipeline.session(...)`")
        return self._ingestion

    # ------------------------------------------------------------------------------------------------------- questions

    def ask(
        self,
        question: str,
        *,
        at_least: int | None = None,
        params: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> AnswerStream:
        """The answer to `question`, chunk by chunk, from the newest version that is computed.

        at_least: wait until that holds the data of this version, as `append` returned it.
        deadline_s: most seconds until the last token.

        Raises, when iterated, DeadlineExceededError, PromptTooLongError, BackendError and PipelineClosedError.
        """
        return AnswerStream(self._asked(question, at_least, params, deadline_s))

    def ask_events(
        self,
        question: str,
        *,
        at_least: int | None = None,
        params: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> EventStream:
        """The same as events: each piece of the answer, then the whole with its version and timings."""
        return EventStream(self._asked(question, at_least, params, deadline_s))

    def _asked(
        self, question: str, at_least: int | None, params: SamplingParams | None, deadline_s: float | None
    ) -> StartQuery:
        if not isinstance(question, str) or not question.strip():
            raise ConfigurationError("the question is empty: ask something")
        if at_least is not None and (not is_whole(at_least) or at_least > self._buffer.num_appended):
            raise ConfigurationError(
                f"at_least={short(at_least)} must be a version that append returned: "
                f"{self._buffer.num_appended} is the newest"
            )
        if deadline_s is not None and (not is_number(deadline_s) or deadline_s <= 0):
            raise ConfigurationError(f"deadline_s={short(deadline_s)} must be a positive number of seconds")
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigurationError(f"params={short(params)} must be a SamplingParams")
        answered = partial(self._answered, plain_text(question), at_least or 0, params)

        def start(emit: Emit) -> "asyncio.Task[Answer]":
            self.check_open()
            return self._running.begin(partial(answered, emit), "question", deadline_s)

        return start

    def watch(
        self,
        question: str,
        *,
        answers: tuple[str, ...] = (),
        every_s: float = 0.0,
        priority: int = 0,
        params: SamplingParams | None = None,
        with_gap: bool = False,
    ) -> "Watch":
        """Have `question` answered ahead after each change of the data; iterate it for answers that changed.

        Whoever asks the same question of the same version, in the same way, has the answer at once.

        answers: the only answers there may be, each with a first token of its own: one token is computed then. They
            are also the answer to whoever asks this question without `params`; with any, the model's own is given.
        every_s: least seconds between two answers.
        priority: the higher are answered first; who was answered longest ago, among equals.
        with_gap: say how sure the model is, by the gap to the next best answer. An engine must know log-probabilities.
        """
        from streamrag.sessions.watching import Watches

        self.check_open()
        if self._watches is None:
            self._watches = Watches(self, self._backend)
        return self._watches.add(question, answers, every_s, priority, params, with_gap)

    async def _answered(self, question: str, at_least: int, given: SamplingParams | None, emit: Emit) -> Answer:
        submitted_s = self._clock()
        params = given or SamplingParams()
        snapshot = await self._at_least(at_least)
        ahead = self._watches.answer_to(question, snapshot.version, given) if self._watches else None
        key = (question, exact_key(params))
        ahead = ahead or self._answers.get(key)
        if ahead is not None:
            answer = again(ahead, submitted_s, self._clock() - submitted_s)
            await emit(TokensGenerated(answer.timings.ttft_s, answer.text, answer.token_ids, answer.finish_reason))
        else:
            answer = await answered(
                self._backend, self._prompts, snapshot, question, params, submitted_s, self._clock, emit
            )
            if key[1] and answer.version == self._started().ready.version and len(self._answers) < MAX_ANSWERS:
                self._answers[key] = answer
        await emit(Answered(answer.timings.total_s, answer))
        return answer

    async def _at_least(self, version: int) -> Snapshot:
        snapshot = await self._started().at_least(version)
        self.check_open()
        return snapshot

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise PipelineClosedError(f"{CLOSED}: open another one")

    def check_open(self) -> None:
        """
        :raises PipelineClosedError: the session was closed.
        :raises BackendError: it has failed, and takes no data any more.
        """
        self._check_not_closed()
        self._started().check()
