"""A session: data that streams in, and whoever asks about it."""

import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from streamrag.answer_stream import AnswerStream, Emit, EventStream, StartQuery
from streamrag.core import Backend, Chunk, SamplingParams, Source
from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.modes import PromptTemplate
from streamrag.propagation import conversation
from streamrag.retrieving import checked_chunk
from streamrag.sessions.answering import again, answered
from streamrag.sessions.asking import Asked, asked
from streamrag.sessions.buffer import Buffer
from streamrag.sessions.choosing import DECISIVE_GAP
from streamrag.sessions.dropping import DataDropped, Drops
from streamrag.sessions.following import append_all, check_followed
from streamrag.sessions.ingestion import CLOSED, Ingestion, Snapshot
from streamrag.sessions.limits import SessionBooks
from streamrag.sessions.log import SessionLog, session_log
from streamrag.sessions.log_lines import KeptWatch
from streamrag.sessions.opening import Opening
from streamrag.sessions.prompts import session_template
from streamrag.sessions.running import Running
from streamrag.sessions.sharing import KeptAnswers, UnderWay
from streamrag.sessions.state import SessionState
from streamrag.support.messages import is_number, is_whole, plain_text, short
from streamrag.support.tasks import run_regardless
from streamrag.telemetry import Answer, Answered, TokensGenerated
from streamrag.tokenizing import in_thread

if TYPE_CHECKING:
    from streamrag.sessions.watch import Watch
    from streamrag.sessions.watching import Admit, Watches

MAX_ANSWERS = 1024
MAX_ANSWER_BYTES = 4_000_000
"""Greedy answers that are kept, for whoever asks the same of the same data: those last asked for."""

MAX_WAITING = 4096
MAX_WAITING_CHARACTERS = 4_000_000
"""Data that wait for the engine, unless the caller says otherwise."""

IN_ONE_TURN = 64
"""Chunks that are appended before others have a turn of the event loop: half a millisecond."""


class AskOptions(TypedDict, total=False):
    """How a question is answered."""

    answers: tuple[str, ...]
    """The only answers there may be, none another's beginning. As few tokens are computed as tell them apart, mostly
    one."""
    at_least: int | None
    """Wait until that holds the data of this version, as `append` returned it."""
    params: SamplingParams | None
    deadline_s: float | None
    """Most seconds until the last token."""
    with_gap: bool
    """Say how sure the model is, by the gap to the next best answer. An engine must know log-probabilities."""
    decisive_gap: float
    """Of `answers`: the one that leads by so much, in log-probability, is taken before all its tokens are computed."""


class Session:
    """Context that streams in, kept computed, and any number of questions about it at once.

    Made by `Pipeline.session`, and used as an async context manager. An answer is the model's to the very text of its
    version: what is computed ahead makes it fast, never other.

    window_tokens: most tokens of data in the prompt; the oldest go for new ones.
    slide_share: share of the window that goes at a time. The rest is then computed anew, in the background, while
        questions are answered from the version before.
    max_waiting, max_waiting_characters: data that waits while the engine computes; beyond it the oldest is dropped.
    batch_interval_s: least seconds between two batches of data, each of which takes the engine a step at least: askers
        wait for fewer steps, and for newer data.
    log: a file that the session's text is kept in; if it is there, the session goes on where it ended.
    tenant, books: whose it is, and where it is counted while it is open; nowhere, without.
    admit: makes room for each answer to a watched question, or refuses it for now; without, there is always room.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        system: str | None = None,
        template: PromptTemplate | None = None,
        window_tokens: int | None = None,
        slide_share: float = 0.5,
        max_waiting: int = MAX_WAITING,
        max_waiting_characters: int = MAX_WAITING_CHARACTERS,
        batch_interval_s: float = 0.0,
        log: SessionLog | str | os.PathLike[str] | None = None,
        name: str = "session",
        tenant: str = "",
        books: SessionBooks | None = None,
        admit: "Admit" = lambda asked: lambda: None,
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
        if not is_number(batch_interval_s) or not 0 <= batch_interval_s < inf:
            raise ConfigurationError(
                f"batch_interval_s={short(batch_interval_s)} must be a number of seconds, 0 or more"
            )
        self._backend = backend
        self._clock = clock
        self._log = session_log(log)
        is_text_given = system is not None or template is not None
        words = session_template(template, system)
        if not isinstance(tenant, str):
            raise ConfigurationError(f"tenant={short(tenant)} must be a str")
        self._books = books
        self._admit_answer = admit
        register = partial(self._register, tenant)
        self._opening = Opening(words, is_text_given, window_tokens, float(slide_share), name, self._log, register)
        self._batch_interval_s = float(batch_interval_s)
        self._buffer = Buffer(max_waiting, max_waiting_characters, self._dropped)
        self._drops = Drops()
        self._num_in_turn = 0
        self._running = Running(name)
        self._conversation = f"session {uuid.uuid4().hex}"
        self._answers = KeptAnswers(MAX_ANSWERS, MAX_ANSWER_BYTES)
        """To the version that stands, by what was asked and whether it has a gap."""
        self._under_way = UnderWay(clock)
        """The same of any version."""
        self._is_closed = self._is_forgotten = self._has_begun = False
        self._watches: Watches | None = None
        self._ingestion: Ingestion | None = None

    # --------------------------------------------------------------------------------------------- starting and ending

    async def start(self) -> None:
        """Have the system text computed. Called by the context manager.

        :raises PromptTooLongError: window and system text do not fit the model's length.
        :raises PipelineClosedError: the session was closed, also meanwhile.
        :raises ConfigurationError: it has been started before.
        :raises SessionLogError: the log cannot be opened, or is of another session.
        :raises TooManySessionsError: of this tenant, or of all, as many are open as may be.
        """
        self._check_not_closed()
        if self._has_begun:
            raise ConfigurationError("the session has been started before: open another one")
        self._has_begun = True
        try:
            ingestion = await self._opening.begin(self._backend, self._buffer)
        except BaseException:
            self._has_begun = False
            self._leave_books()
            raise
        if self._is_closed:
            self._leave_books()
            if self._log is not None:
                await self._log.aclose()
        self._check_not_closed()
        token = conversation.set(self._conversation)  # for the task that it starts
        ingestion.start(self._data_updated, self._drops.end, self._batch_interval_s)
        conversation.reset(token)
        self._ingestion = ingestion
        for kept in self._log.watches.values() if self._log else ():
            self._watching().begin(kept.watch, kept)

    async def aclose(self, *, forgets: bool = False) -> None:
        """End all questions and watches, and free the session's KV; with `forgets`, remove its log too."""
        self._is_closed = True
        self._is_forgotten = forgets
        await run_regardless(self._close(), "streamrag session closes")

    def _register(self, tenant: str, window_tokens: int) -> None:
        if self._books is not None:
            self._books.check(tenant, window_tokens)
            self._books.put(self, tenant, window_tokens)

    def _leave_books(self) -> None:
        if self._books is not None:
            self._books.remove(self)

    async def _close(self) -> None:
        try:
            if self._watches is not None:
                await self._watches.aclose()
            await self._running.aclose()
            if self._ingestion is not None:
                await self._ingestion.aclose()
            if self._log is not None and (self._ingestion is not None or self._is_forgotten):
                await self._log.aclose(removes=self._is_forgotten)
        finally:
            self._leave_books()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def version(self) -> int:
        """Of the data that questions are answered from at once."""
        return self._started().ready.version

    @property
    def watches(self) -> dict[str, "Watch"]:
        """Those that have a name, by that."""
        return dict(self._watches.named) if self._watches else {}

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
            num_frozen_tokens=len(ingestion.ready.prompts.head),
            window_tokens=ingestion.window.max_tokens,
            num_failures=ingestion.num_failures,
            log=self._log.state if self._log else None,
        )

    # ------------------------------------------------------------------------------------------------------------ data

    async def append(self, data: Chunk | str) -> int:
        """Add data at the end; returns with its version, which is how many chunks have been appended,
        and system texts frozen.

        It waits for nothing, but gives others a turn of the event loop now and then, and each time while half of what
        may wait does: what can be taken in is. If more comes than that, the oldest that waits is dropped: see `state`
        and `drops`. Who is cancelled there has appended nothing.

        :raises SessionLogError: a session with a log takes no chunk of more than a million characters.
        :raises PipelineClosedError: the session was closed.
        """
        self.check_open()
        chunk = self._shown(data)
        await self._turn()
        self.check_open()
        return self._started().append(chunk)

    async def extend(self, data: Sequence[Chunk | str]) -> int:
        """Add several chunks at the end, all of them or none, and none for another of them; the newest version.

        :raises ConfigurationError: there are more than may wait at once, `max_waiting` and `max_waiting_characters`.
        :raises SessionLogError, PipelineClosedError: as of `append`.
        """
        if isinstance(data, str) or not isinstance(data, Sequence):
            raise ConfigurationError(f"data={short(data)} must be a list of chunks or texts; one of them is for append")
        self.check_open()
        chunks = []
        for each in data:
            chunks.append(self._shown(each))
            await self._turn()
        self.check_open()
        self._buffer.check(chunks)
        for chunk in chunks:
            self._started().append(chunk)
        return self._buffer.num_appended

    def _shown(self, data: Chunk | str) -> Chunk:
        chunk = self._started().ready.prompts.shown(checked_chunk(Chunk(data, "") if isinstance(data, str) else data))
        if self._log is not None:
            self._log.check(chunk)
        return chunk

    async def _turn(self) -> None:
        self._num_in_turn += 1
        if self._num_in_turn >= IN_ONE_TURN or self._buffer.is_half_full:
            self._num_in_turn = 0
            await asyncio.sleep(0)

    async def flush(self) -> int:
        """Wait until all that has been appended is in the log, and on the disk as far as the system knows (`fsync`).

        Returns the version that is. Without it, what a killed process had appended in its last moments may be missing.

        :raises SessionLogError: the disk does not take it; the session goes on, and so does trying.
        :raises ConfigurationError: the session has no log.
        """
        self.check_open()
        if self._log is None:
            raise ConfigurationError("the session has no log: open it with log=PATH")
        return await self._log.flush()

    async def follow(self, source: Source | AsyncIterable[Chunk | str], query: str = "") -> int:
        """Append all that a source or an async iterator yields, until it ends; the newest version.

        Of an update of a source what is new is appended. An iterator that is a generator is closed, however it ends.

        source: a source, or an async iterator of texts or chunks.
        query: what a source is asked.

        :raises SourceError: it failed, or yielded something else; what came before stays.
        :raises ConfigurationError: it is neither a source nor an async iterator.
        :raises PipelineClosedError: the session was closed.
        """
        check_followed(source, query)
        self.check_open()
        await self._running.begin(partial(append_all, source, query, self.append), "source")
        return self._buffer.num_appended

    async def freeze(self, system: str) -> int:
        """Have another system text from now on: other instructions, and with them documents, or a summary of what has
        gone.

        All that stands behind it is computed anew in the background, as when the window slides, and meanwhile questions
        are answered from the version before. Returns the version that has it, as `append` does; a later one has the
        text that was frozen last. In a session with a log it is there again when that is resumed.

        :raises PromptTooLongError: beside the window it leaves no room for a question. Nothing has changed.
        :raises ConfigurationError: it is no str.
        :raises SessionLogError: a session with a log takes no system text of more than a million characters.
        :raises PipelineClosedError: the session was closed, also meanwhile.
        """
        if not isinstance(system, str):
            raise ConfigurationError(f"system={short(system)} must be a str")
        self.check_open()
        system = plain_text(system)
        if self._log is not None:
            self._log.check_system(system)
        ingestion = self._started()
        before = ingestion.ready.prompts
        prompts = await in_thread(before.tokenizer, partial(before.with_system, system))
        prompts.check_window(ingestion.window.max_tokens)
        self.check_open()
        return ingestion.freeze(prompts, system)

    async def newest(self, *, behind: int = 0, at_most: int = 100) -> list[tuple[int, str]]:
        """The newest data in the window, oldest first, each with its version and its text as it stands in the prompt.

        behind: only what came after this version.
        at_most: so many.
        """
        for option, value, least in (("behind", behind, 0), ("at_most", at_most, 1)):
            if not is_whole(value) or value < least:
                raise ConfigurationError(f"{option}={short(value)} must be a whole number, at least {least}")
        self.check_open()
        pieces = self._started().window.newest(behind, at_most)
        prompts = self._started().ready.prompts

        def texts() -> list[tuple[int, str]]:
            return [(piece.number, prompts.text_of(piece)) for piece in pieces]

        return await in_thread(prompts.tokenizer, texts, is_background=True)

    async def versions(self) -> AsyncGenerator[int, None]:
        """The version that questions are answered from, whenever it has changed; a slow reader gets the newest.

        :raises PipelineClosedError: the session was closed.
        """
        version = self.version
        while True:
            version = (await self._at_least(version + 1)).version
            yield version

    async def drops(self) -> AsyncGenerator[DataDropped, None]:
        """Data that are dropped from now on, those of a quarter of a second together.

        :raises PipelineClosedError: the session was closed.
        :raises BackendError: it has failed.
        """
        self.check_open()
        async with aclosing(self._drops.read()) as told:
            async for dropped in told:
                yield dropped
        self.check_open()

    def _dropped(self, number: int) -> None:
        if self._log is not None:
            self._log.dropped(number)
        self._drops.put(number, self._buffer.num_dropped)

    def _data_updated(self) -> None:
        self._answers.clear()
        if self._watches is not None:
            self._watches.data_updated()

    def _started(self) -> Ingestion:
        if self._ingestion is None:
            raise ConfigurationError("the session has not been started: use `async with pipeline.session(...)`")
        return self._ingestion

    # ------------------------------------------------------------------------------------------------------- questions

    def ask(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Return the answer to `question`, chunk by chunk, from the newest version that is computed.

        Raises, when iterated, DeadlineExceededError, PromptTooLongError, BackendError and PipelineClosedError; and
        ConfigurationError for answers that cannot be told from each other.
        """
        return AnswerStream(self._asked(question, **options))

    def ask_ahead(self, asked: Asked) -> AnswerStream:
        """Answer a watched question: nobody has asked it yet, and who does is to have the answer at once."""
        return AnswerStream(self._starting(asked, 0, None))

    def ask_events(self, question: str, **options: Unpack[AskOptions]) -> EventStream:
        """The same as events: each piece of the answer, then the whole with its version and timings."""
        return EventStream(self._asked(question, **options))

    def _asked(
        self,
        question: str,
        *,
        answers: tuple[str, ...] = (),
        at_least: int | None = None,
        params: SamplingParams | None = None,
        deadline_s: float | None = None,
        with_gap: bool = False,
        decisive_gap: float = DECISIVE_GAP,
    ) -> StartQuery:
        what = asked(question, answers, SamplingParams() if params is None else params, with_gap, decisive_gap)
        if at_least is not None and (not is_whole(at_least) or at_least > self._buffer.num_appended):
            raise ConfigurationError(
                f"at_least={short(at_least)} must be a version that append returned: "
                f"{self._buffer.num_appended} is the newest"
            )
        if deadline_s is not None and (not is_number(deadline_s) or deadline_s <= 0):
            raise ConfigurationError(f"deadline_s={short(deadline_s)} must be a positive number of seconds")
        return self._starting(what, at_least or 0, deadline_s)

    def _starting(self, asked: Asked, at_least: int, deadline_s: float | None) -> StartQuery:
        answered = partial(self._answered, asked, at_least)

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
        decisive_gap: float = DECISIVE_GAP,
        name: str | None = None,
    ) -> "Watch":
        """Have `question` answered ahead after each change of the data; iterate it for answers that changed.

        Whoever asks the same question of the same version, in the same way, has the answer at once: with the same
        `answers`, or else the same `params`.

        answers, with_gap, decisive_gap: as of `ask`.
        every_s: least seconds between two answers.
        priority: the higher are answered first; who was answered longest ago, among equals.
        name: under which it is found in `watches`; another one of that name goes. In a session with a log it is there
            again when that is resumed, unless it was closed before the session.

        :raises ConfigurationError: values that cannot work.
        :raises SessionLogError: it has a name, and is too long for the log.
        """
        self.check_open()
        params = SamplingParams(max_tokens=64) if params is None else params
        given = KeptWatch("", question, answers, every_s, priority, with_gap, decisive_gap, params)
        return self._watching().add(name, given)

    def _watching(self) -> "Watches":
        from streamrag.sessions.watching import Watches

        if self._watches is None:
            self._watches = Watches(self, self._log, self._admit_answer)
        return self._watches

    async def _answered(self, asked: Asked, at_least: int, emit: Emit) -> Answer:
        conversation.set(self._conversation)  # this task is this question's alone
        submitted_s = self._clock()
        snapshot = await self._at_least(at_least)
        ahead = self._watches.answer_to(asked, snapshot.version) if self._watches else None
        key = (asked.key, asked.with_gap)
        ahead = ahead or self._answers.get(key)
        if ahead is not None:
            answer = again(ahead, submitted_s, self._clock() - submitted_s)
            await emit(TokensGenerated(answer.timings.ttft_s, answer.text, answer.token_ids, answer.finish_reason))
        else:
            compute = partial(self._computed, snapshot, asked, submitted_s)
            if asked.key[-1]:
                answer = await self._under_way.answer((key, snapshot.version), compute, submitted_s, emit)
            else:
                answer = await compute(emit)
        await emit(Answered(answer.timings.total_s, answer))
        return answer

    async def _computed(self, snapshot: Snapshot, asked: Asked, submitted_s: float, emit: Emit) -> Answer:
        answer = await answered(self._backend, snapshot, asked, submitted_s, self._clock, emit)
        if asked.key[-1] and answer.version == self.version:
            parts = (asked.question, *asked.answers, answer.text, answer.token_ids, *answer.token_ids)
            self._answers.put((asked.key, asked.with_gap), answer, sum(map(sys.getsizeof, parts)))
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
