"""How a session begins: its prompts, its window, and what a log holds of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from streamrag.core import Backend
from streamrag.errors import SessionLogError
from streamrag.modes import PromptTemplate
from streamrag.sessions.buffer import Buffer
from streamrag.sessions.ingestion import Ingestion
from streamrag.sessions.log import SessionLog
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Window
from streamrag.tokenizing import in_thread


@dataclass(frozen=True, slots=True)
class Opening:
    """What was asked of a session when it was opened."""

    template: PromptTemplate
    is_text_given: bool
    """Whether its words were chosen; if not, the system text is that of the log, where there is one."""
    window_tokens: int | None
    slide_share: float
    name: str
    log: SessionLog | None
    admit: Callable[[int], None]
    """Called with the tokens of its window; raises TooManySessionsError if there is no place for it."""

    async def begin(self, backend: Backend, buffer: Buffer) -> Ingestion:
        """Ingestion, not started; with what the log holds, if there is one.

        :raises PromptTooLongError: window and system text do not fit the model's length.
        :raises SessionLogError: the log cannot be opened, or is of another session. It is closed, whatever is raised.
        :raises TooManySessionsError: there is no place for it.
        """
        try:
            return await self._begin(backend, buffer)
        except BaseException:
            if self.log is not None:
                await self.log.aclose()
            raise

    async def _begin(self, backend: Backend, buffer: Buffer) -> Ingestion:
        logged = None if self.log is None else await self.log.open()
        template, window_tokens = self.template, self.window_tokens
        if self.log is not None and logged is not None:
            if self.is_text_given and template.system not in (logged.header.system, logged.system):
                raise SessionLogError(
                    f"{self.log.path} is of a session with another system text: give none, or that one, or choose "
                    "another file"
                )
            template = replace(template, system=logged.system)
            window_tokens = window_tokens or logged.header.window_tokens
        model = backend.model
        prompts = await in_thread(model.tokenizer, partial(SessionPrompts, model, template))
        window_tokens = window_tokens or max(prompts.room * 3 // 4, 1)
        prompts.check_window(window_tokens)
        self.admit(window_tokens)
        window = Window(window_tokens, self.slide_share, prompts.passage_end)
        ingestion = Ingestion(backend, self.name, buffer, window, prompts, self.log)
        pieces = []
        if logged is not None:
            pieces = await prompts.pieces_in_background(logged.chunks)
            window.num_slid = logged.header.num_slid
            buffer.num_appended, buffer.num_dropped = logged.num_appended, logged.num_dropped
        if self.log is not None:
            system = template.system if logged is None else logged.header.system  # which a frozen one may have followed
            self.log.start(system, window_tokens, self.slide_share, logged)
            if logged is not None:
                await self.log.begun()
        ingestion.resume(pieces)
        return ingestion
