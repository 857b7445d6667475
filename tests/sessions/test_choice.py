"""One of a few answers, by as few passes as tell them apart."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streamrag import BackendError, ConfigurationError
from streamrag.sessions.answer import choose_answer, encode_answers
from streamrag.testing import CodePointTokenizer

Ids = tuple[int, ...]


class Model:
    """The log-probability of each token behind each beginning, the same whenever it is asked."""

    def __init__(self, seed: int, spread: float = 3.0, *, has_logprobs: bool = True) -> None:
        self.seed, self.spread, self.has_logprobs = seed, spread, has_logprobs
        self.asked: list[Ids] = []

    def logprob(self, begun: Ids, token_id: int) -> float:
        return -random.Random(f"{self.seed} {begun} {token_id}").expovariate(1 / self.spread)

    def of(self, token_ids: Ids) -> float:
        return sum(self.logprob(token_ids[:i], token_id) for i, token_id in enumerate(token_ids))

    async def one_pass(self, begun: Ids, allowed: Sequence[int]) -> tuple[int | None, Any]:
        self.asked.append(begun)
        values = {each: self.logprob(begun, each) for each in allowed}
        logprobs = {each: SimpleNamespace(logprob=value) for each, value in values.items()}
        return max(values, key=values.__getitem__), logprobs if self.has_logprobs else None


def answers_of(rng: random.Random) -> dict[Ids, str]:
    """Some, of which none is another's beginning."""
    texts = {"".join(rng.choice("ab") for _ in range(4)) for _ in range(rng.randint(2, 6))}
    return encode_answers(CodePointTokenizer(), sorted(texts | {"c", "dd"}))


@pytest.mark.parametrize("seed", range(50))
async def test_without_a_threshold_it_is_the_likeliest_of_all(seed: int) -> None:
    answers, model = answers_of(random.Random(seed)), Model(seed)
    found = await choose_answer(answers, model.one_pass, math.inf)
    best, second, *_ = sorted(map(model.of, answers), reverse=True)
    assert model.of(tuple(map(ord, found.text))) == best
    assert found.gap is not None
    assert 0 <= found.gap <= best - second + 1e-9


async def test_with_a_threshold_passes_are_saved_and_only_close_answers_may_change() -> None:
    num_passes = []
    for seed in range(200):
        answers = answers_of(random.Random(seed))
        exact, quick = Model(seed), Model(seed)
        likeliest = await choose_answer(answers, exact.one_pass, math.inf)
        found = await choose_answer(answers, quick.one_pass, 2.0)
        num_passes.append((len(exact.asked), len(quick.asked)))
        if found.text != likeliest.text:  # what was not computed of it was worth more than its lead
            begun = len(found.token_ids)
            ids = tuple(map(ord, found.text))
            assert exact.of(ids) - exact.of(ids[:begun]) < -2.0
    assert all(quick <= whole for whole, quick in num_passes)
    assert sum(quick for _, quick in num_passes) < sum(whole for whole, _ in num_passes)


async def test_answers_of_one_token_take_one_pass() -> None:
    model = Model(1)
    found = await choose_answer(encode_answers(CodePointTokenizer(), ("y", "n")), model.one_pass)
    assert model.asked == [()]
    assert found.gap == abs(model.logprob((), ord("y")) - model.logprob((), ord("n")))


async def test_a_decisive_first_token_is_enough_and_its_answer_is_whole() -> None:
    model = Model(0)
    found = await choose_answer(encode_answers(CodePointTokenizer(), ("yes", "no")), model.one_pass, 0.0)
    assert found.text in ("yes", "no")
    assert found.token_ids == tuple(map(ord, found.text[:1]))
    assert model.asked == [()]


async def test_the_common_beginning_of_answers_takes_no_pass_and_their_parting_one() -> None:
    model = Model(3)
    found = await choose_answer(encode_answers(CodePointTokenizer(), ("very high", "very low")), model.one_pass, 0.0)
    assert model.asked == [tuple(map(ord, "very "))]
    assert found.text in ("very high", "very low")
    alone = await choose_answer(encode_answers(CodePointTokenizer(), ("yes",)), model.one_pass)
    assert (alone.text, alone.gap) == ("yes", None)
    assert len(model.asked) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_an_engine_without_log_probabilities_is_followed(seed: int) -> None:
    model = Model(seed, has_logprobs=False)
    found = await choose_answer(encode_answers(CodePointTokenizer(), ("very high", "very low", "no")), model.one_pass)
    assert found.gap is None
    begun = tuple(map(ord, "very "))
    if found.text == "no":
        assert (found.token_ids, model.asked) == ((ord("n"),), [()])
    else:
        assert (found.token_ids[:-1], model.asked) == (begun, [(), begun])
    likely = {text: model.logprob((), ord(text[0])) for text in ("no", "very")}
    assert found.text.startswith(max(likely, key=likely.__getitem__))


async def test_a_token_that_is_in_no_answer_is_an_error() -> None:
    async def other(begun: Ids, allowed: Sequence[int]) -> tuple[int | None, Any]:
        return None, None

    with pytest.raises(BackendError, match="none of the answers"):
        await choose_answer(encode_answers(CodePointTokenizer(), ("yes", "no")), other)


@pytest.mark.parametrize("answers", [("yes", "yesterday"), ("yesterday", "yes"), ("yes", "yes")])
def test_an_answer_that_begins_another_is_refused(answers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="begin with the same tokens"):
        encode_answers(CodePointTokenizer(), answers)


def test_an_answer_without_tokens_is_refused() -> None:
    class Deaf(CodePointTokenizer):
        def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
            return []

    with pytest.raises(ConfigurationError, match="no tokens"):
        encode_answers(Deaf(), ("yes", "no"))


async def test_the_only_possible_answer_has_no_gap() -> None:
    async def certain(begun: Ids, allowed: Sequence[int]) -> tuple[int | None, Any]:
        values = {each: 0.0 if each == ord("y") else -math.inf for each in allowed}
        return ord("y"), {each: SimpleNamespace(logprob=value) for each, value in values.items()}

    found = await choose_answer(encode_answers(CodePointTokenizer(), ("yes", "no")), certain)
    assert (found.text, found.token_ids, found.gap) == ("yes", (ord("y"),), None)
