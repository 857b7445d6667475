"""Sessions with tokenizers that merge characters, over chunks that break where no text should."""

import pytest

from streamrag import Chunk
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import ModelInfo, Tokenizer
from streamrag.demo.smollm2 import _packed_file, _write_tokenizer
from streamrag.modes import PromptAssembler
from streamrag.sessions import Session
from streamrag.sessions.prompts import SESSION_TEMPLATE
from streamrag.testing import ScriptedBackend

ODD = [
    *("", " ", "   ", "\n", "\n\n\n", "\t", "\r", "\r\n", "\x00", "\u2028"),
    *("lo", "w", "er", " a", "a ", "1", "23", "456", "   indented", "trailing   "),
    *("\ud83d", "\ude00", "😀", "👩", "\u200d", "👩‍👩‍👧", "e", "\u0301", "日本", "語"),
    *("<|im_end|>", "<|im", "_end|>", "<|end|>", "x" * 3000),
]


@pytest.fixture(scope="module", params=["SmolLM2", "tiny"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "tiny":
        return HuggingFaceTokenizer(request.getfixturevalue("tiny_model"))
    gguf = pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    _write_tokenizer(folder, gguf.GGUFReader(_packed_file()))  # as in the demo's model, without its weights
    return HuggingFaceTokenizer(folder)


class Engine(ScriptedBackend):
    """With any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        super().__init__("yes", max_model_len=max_model_len)
        self.model = ModelInfo("scripted", tokenizer, max_model_len)

    @property
    def ahead(self) -> list[tuple[int, ...]]:
        """What the session has had computed, in order."""
        return [prompt.token_ids for prompts in self.prompts for prompt in prompts if not prompt.is_complete]

    @property
    def asked(self) -> tuple[int, ...]:
        """The newest whole prompt."""
        return next(prompts[-1].token_ids for prompts in reversed(self.prompts) if prompts and prompts[-1].is_complete)


async def ask(session: Session, at_least: int) -> None:
    async for _ in session.ask("Is it so?", at_least=at_least):
        pass


async def test_appended_data_change_no_earlier_token_and_make_the_prompt_of_one_query(
    tokenizer: Tokenizer,
) -> None:
    engine = Engine(tokenizer, 16_384)
    chunks: list[Chunk] = []
    async with Session(engine) as session:
        for text in ODD:
            chunks.append(Chunk(text, ""))
            await ask(session, await session.append(chunks[-1]))
            whole = PromptAssembler(tokenizer, SESSION_TEMPLATE, "Is it so?", max_model_len=16_384, max_tokens=1)
            assert engine.asked == whole.assemble(chunks, is_complete=True).prompt.token_ids
            assert engine.asked[: len(engine.ahead[-1])] == engine.ahead[-1]
        assert session.state.num_slid == 0
    for before, after in zip(engine.ahead, engine.ahead[1:], strict=False):
        assert after[: len(before)] == before
    text = tokenizer.decode(engine.asked)
    assert "".join(f"{each}\n" for each in ODD).replace("\ud83d", "\ufffd").replace("\ude00", "\ufffd") in text


@pytest.mark.parametrize(
    ("window_tokens", "slide_share", "system", "max_model_len"),
    [
        (1, 0.5, "Watch.", 2048),
        (2, 0.5, "Watch.", 2048),
        (3, 0.9, "Watch.", 2048),
        (10, 0.1, "Watch.", 2048),
        (50, 0.5, "Watch these long words. " * 50, 2048),
        (1900, 0.5, "Watch.", 2048),
    ],
)
async def test_windows_of_any_size_hold_what_they_may_and_end_with_a_whole_line(
    tokenizer: Tokenizer, window_tokens: int, slide_share: float, system: str, max_model_len: int
) -> None:
    engine = Engine(tokenizer, max_model_len)
    async with Session(engine, system=system, window_tokens=window_tokens, slide_share=slide_share) as session:
        for text in [*ODD, *("word " * 300,) * 8]:
            await ask(session, await session.append(text))
            head, data = engine.ahead[0], engine.ahead[-1][len(engine.ahead[0]) :]
            assert engine.ahead[-1] == head + data
            assert len(data) <= window_tokens
            assert window_tokens < 10 or not data or tokenizer.decode(data).endswith("\n")
        assert session.state.num_slid > 0


async def test_chunks_of_a_hundred_thousand_characters_are_cut(tokenizer: Tokenizer) -> None:
    engine = Engine(tokenizer, 8_192)
    async with Session(engine, window_tokens=5_000) as session:
        for text in ("x" * 100_000, "😀" * 100_000, " " * 100_000):
            await ask(session, await session.append(text))
            assert session.state.num_tokens - len(engine.ahead[0]) <= 5_000
