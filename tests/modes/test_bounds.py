from collections.abc import Sequence

import pytest

from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import Chunk, Turn
from streamrag.errors import PromptTooLongError
from streamrag.modes import PromptAssembler, PromptTemplate
from streamrag.modes.bounds import encode_bounded
from streamrag.modes.passages import PassageFormat


class Words:
    """A token a word, or a run of white space, and the number of characters that were encoded."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        self.num_encoded += len(text)
        return [len(word) for word in text.split(" ")]

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return "\n".join(turn.text for turn in turns)


@pytest.mark.parametrize("text", ["", "a", "a b c", "a " * 9, "longword " * 9, f"{'x' * 400} " * 9, "x" * 100_000])
def test_a_text_that_may_fit_has_its_own_tokens(text: str) -> None:
    assert encode_bounded(Words(), text, 10) == Words().encode(text)


@pytest.mark.parametrize("num_words", [1_000, 1_000_000])
def test_only_the_beginning_of_a_text_that_cannot_fit_is_tokenised(num_words: int) -> None:
    tokenizer = Words()
    assert len(encode_bounded(tokenizer, "word " * num_words, 10)) == 17
    assert tokenizer.num_encoded == 80


def test_a_text_of_long_tokens_is_looked_at_twice_as_far_each_time() -> None:
    tokenizer = Words()
    assert len(encode_bounded(tokenizer, f"{'x' * 99} " * 1_000_000, 10)) == 13
    assert tokenizer.num_encoded == 80 + 160 + 320 + 640 + 1280


def assembler(tokenizer: Words | CodePointTokenizer, **more: object) -> PromptAssembler:
    template = PromptTemplate(system=str(more.pop("system", "")))
    question = str(more.pop("question", "Why?"))
    return PromptAssembler(tokenizer, template, question, max_model_len=1000, max_tokens=10, **more)  # type: ignore[arg-type]


def test_a_chunk_that_cannot_fit_is_left_out_without_being_tokenised_whole() -> None:
    tokenizer = Words()
    huge, small = Chunk("word " * 1_000_000, "huge"), Chunk("a b c", "small")
    assembled = assembler(tokenizer).assemble((huge, small), is_complete=True)
    assert (assembled.included, assembled.left_out) == ((small,), (huge,))
    assert tokenizer.num_encoded < 20_000


def test_a_chunk_that_cannot_fit_is_not_written_whole_either(monkeypatch: pytest.MonkeyPatch) -> None:
    num_written = 0
    write = PassageFormat.format

    def counting(self: PassageFormat, number: int, chunk: Chunk) -> str:
        nonlocal num_written
        num_written += len(chunk.text)
        return write(self, number, chunk)

    monkeypatch.setattr(PassageFormat, "format", counting)
    assembler(Words()).assemble([Chunk("word " * 1_000_000, "huge")], is_complete=True)
    assert num_written < 20_000


@pytest.mark.parametrize(
    "parts",
    [
        {"question": "word " * 1_000_000},
        {"system": "word " * 1_000_000},
        {"history": [Turn("user", "word " * 1_000_000), Turn("assistant", "word")] * 50},
    ],
    ids=["question", "system", "history"],
)
def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenised_whole(parts: dict[str, object]) -> None:
    tokenizer = Words()
    with pytest.raises(PromptTooLongError, match=r"take at least \d+ tokens"):
        assembler(tokenizer, **parts)
    assert tokenizer.num_encoded < 40_000
