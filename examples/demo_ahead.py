"""The last part of `demo.py`: a crawl whose answer is drafted while it runs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from streamrag import Pipeline, QueryOptions, VllmBackend
from streamrag.telemetry import Answer, Answered, ChunkArrived, ContextComplete, DraftChanged, QueryEvent
from streamrag_bench.compare.pairs import AskedPair, answer_of

Printable = Callable[[str], str]


@dataclass(frozen=True)
class AheadPair:
    """One question asked with an answer ahead of the end of retrieval, and without. Both prefill meanwhile."""

    ahead: list[QueryEvent]
    without: list[QueryEvent]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        return answer_of(self.ahead), answer_of(self.without)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The numbers, for `results.json`."""
        return [
            {"arm": arm, **asdict(answer.timings), "draft": answer.draft and asdict(answer.draft), "text": answer.text}
            for arm, answer in zip(("with drafts", "without drafts"), self.answers, strict=True)
        ]

    def outcome(self) -> str:
        """Return in one or two sentences how much sooner the answer was complete."""
        ahead, plain = self.answers
        first, first_plain = (answer.timings.ttft_after_retrieval_s for answer in self.answers)
        last, last_plain = (answer.timings.total_s - answer.timings.retrieval_s for answer in self.answers)
        assert ahead.draft is not None
        same = "the same" if ahead.token_ids == plain.token_ids else "different"
        use = f"{ahead.draft.num_accepted} of {len(ahead.token_ids)} came from the draft"
        if not ahead.draft.num_drafted:
            use = "there was no draft, because the engine had no time before retrieval ended"
        return (
            f"last token after retrieval: {last:.2f} s with drafts, {last_plain:.2f} s without; first token: "
            f"{first:.2f} s and {first_plain:.2f} s. The answers have {same} tokens; {use}."
        )


async def ask_ahead(
    pipeline: Pipeline,
    backend: VllmBackend,
    without: AskedPair,
    options: QueryOptions,
    on_event: Callable[[QueryEvent], object],
) -> AheadPair:
    """Ask the question of a pair again with an empty prefix cache, and with an answer ahead of retrieval's end."""
    await backend.reset_prefix_cache()
    ahead = []
    drafting: QueryOptions = {**options, "overlap": True, "answer_ahead": True}
    async for event in pipeline.events(without.question, **drafting):
        ahead.append(event)
        on_event(event)
    return AheadPair(ahead, without.streaming)


class DraftDisplay:
    """Shows the newest draft in grey: on a terminal below everything else, and in a line when the context changes."""

    def __init__(self, console: Console, printable: Printable) -> None:
        self._console = console
        self._printable = printable
        self._status = console.status("")
        self._draft: DraftChanged | None = None
        self._shown = ""

    def __enter__(self) -> "DraftDisplay":
        self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def show(self, event: QueryEvent) -> None:
        """Show a draft, or a line of another event."""
        match event:
            case DraftChanged():
                self._draft = event
                self._status.update(self._line(event))
            case ChunkArrived(chunk=chunk):
                self._print_draft()
                self._print(event.at_s, f"+ {chunk.title[:60]}")
            case ContextComplete():
                self._print_draft()
                self._status.update("verifying the draft")
                self._print(event.at_s, "retrieval complete")
            case Answered(answer=answer):
                self._print(event.at_s, f"answer: {answer.text}")

    def _print_draft(self) -> None:
        if self._draft is not None and self._draft.text != self._shown:
            self._shown = self._draft.text
            self._console.print(self._line(self._draft), soft_wrap=True)

    def _line(self, draft: DraftChanged) -> Text:
        num = len(draft.chunks)
        text = " ".join(draft.text.split())
        words = f"{draft.at_s:7.2f} s   perhaps, after {num} page{'s' * (num != 1)}: {text}"
        return Text(self._printable(words), style="bright_black")

    def _print(self, at_s: float, line: str) -> None:
        self._console.print(f"{at_s:7.2f} s {self._printable(line)}", markup=False, soft_wrap=True)
