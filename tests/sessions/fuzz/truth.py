"""What a session's answers must be, worked out anew from the texts that were appended."""

from collections import deque
from dataclasses import dataclass, field

from streamrag import SamplingParams
from streamrag.sessions import Session
from streamrag.telemetry import Answer
from tests.engine.fuzz.clients import check

from .engine import LONGEST, answer_to

__all__ = ["Asked", "Truth"]


ONE_TOKEN = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was answered."""

    question: str
    answer: Answer
    params: SamplingParams
    answers: tuple[str, ...] = ()
    """The only ones that there may be."""


@dataclass
class Truth:
    """One session's."""

    name: str
    system: str
    window_tokens: int
    slide_share: float
    texts: list[str] = field(default_factory=list)
    """All that were appended; nothing in the place of a system text."""
    systems: dict[int, str] = field(default_factory=dict)
    """Those that were frozen, by version."""
    dropped: set[int] = field(default_factory=set)
    """Numbers, from 1, of those that waited when there was no room."""
    data: dict[int, str] = field(default_factory=lambda: {0: ""})
    """By version: what the prompt has between its head and its tail."""
    num_slides: int = 0
    _window: deque[str] = field(default_factory=deque)

    async def append(self, session: Session, text: str) -> int:
        """The version, as the session says."""
        before = session.state
        version = await session.append(text)
        self.texts.append(text)
        check(version == len(self.texts), f"{self.name}: version {version} after {len(self.texts)} texts")
        state = session.state  # what was dropped stood just before those that wait now
        data = [number for number in range(1, version + 1) if number not in self.systems]
        older = data[: len(data) - state.num_waiting]
        self.dropped.update(older[len(older) - (state.num_dropped - before.num_dropped) :])
        return version

    async def freeze(self, session: Session, system: str) -> int:
        """The version, as the session says."""
        version = await session.freeze(system)
        self.texts.append("")
        self.systems[version] = system
        check(version == len(self.texts), f"{self.name}: version {version} after {len(self.texts)} texts")
        return version

    def stands(self, version: int) -> None:
        """Another version is there: all that came since the one before is in it."""
        kept = max(int(self.window_tokens * (1 - self.slide_share)), 1)
        newest = max(self.data)
        check(version > newest, f"{self.name}: version {version} after {newest}")
        for number in range(newest + 1, version + 1):
            if number not in self.dropped and number not in self.systems:
                self._window.append(self._cut(f"{self.texts[number - 1]}\n", kept))
            if len("".join(self._window)) > self.window_tokens:
                self.num_slides += 1
                while len("".join(self._window)) > kept:
                    self._window.popleft()
        self.data[version] = "".join(self._window)

    @staticmethod
    def _cut(line: str, kept: int) -> str:
        """A line that is too long keeps its line break, unless there is room for no more than that."""
        return line if len(line) <= kept else line[: max(kept - 1, 1)] + "\n" * (kept > 1)

    def prompt(self, version: int, question: str) -> list[int]:
        """As one request has it that asks this of that version."""
        system = self.systems.get(max((each for each in self.systems if each <= version), default=0), self.system)
        head = f"{system}\n\n" if system else ""
        data = self.data[version] or "(no data yet)\n"
        return list(map(ord, f"{head}User: Data:\n\n{data}\nQuestion: {question}\n\nAssistant:"))

    def can_be_too_long(self, question: str, answers: tuple[str, ...] = ()) -> bool:
        """Whether there was a version that left no room for this question, and for all but the last token of one of
        these answers."""
        num_begun = max((len(answer) - 1 for answer in answers), default=0)
        return any(len(self.prompt(version, question)) + num_begun >= LONGEST for version in self.data)

    def check_answer(self, asked: Asked) -> None:
        """That this is the model's answer to the data of the version that it says it is of."""
        answer, version = asked.answer, asked.answer.version
        what = f"{self.name}: the answer to {asked.question!r} of version {version}"
        check(version is not None and version in self.data, f"{what}, which never stood")
        assert version is not None
        prompt = self.prompt(version, asked.question)
        check(answer.num_prompt_tokens == len(prompt), f"{what} is of {answer.num_prompt_tokens} not {len(prompt)}")
        expected, text = answer_to(prompt, asked.params), None
        if asked.answers:
            expected, text = self._choice(prompt, asked.answers)
        check(answer.token_ids == expected, f"{what} is {answer.token_ids}, of one request {expected}")
        check(text in (None, answer.text), f"{what} is {answer.text!r}, not {text!r}")

    @staticmethod
    def _choice(prompt: list[int], answers: tuple[str, ...]) -> tuple[tuple[int, ...], str]:
        """The tokens that it takes to tell one answer from the others, and the answer."""
        begun = ""
        while len(left := [text for text in answers if text.startswith(begun)]) > 1:
            after = sorted({ord(text[len(begun)]) for text in left})
            token_ids = after if len(after) == 1 else answer_to([*prompt, *map(ord, begun)], ONE_TOKEN, after)
            begun += chr(token_ids[0])
        return tuple(map(ord, begun)), left[0]
