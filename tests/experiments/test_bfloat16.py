"""What `make bench-bfloat16` counts."""

from itertools import pairwise
from types import SimpleNamespace

import bfloat16
from bfloat16 import Token, difference, random_prompts, tokens_of


def test_the_first_difference_of_each_answer_counts_with_the_references_margin() -> None:
    reference = [[Token(1, 0.5), Token(2, 0.25)], [Token(3, 0.0), Token(4, 1.0)], [Token(5, 2.0)]]
    answers = [[Token(1, 0.5), Token(9, 0.1)], [Token(8, 0.0), Token(9, 1.0)], [Token(5, 1.9)]]
    assert difference(answers, reference) == {
        "num_prompts": 3,
        "num_different": 2,
        "first_differences": [{"position": 1, "margin": 0.25}, {"position": 0, "margin": 0.0}],
    }


def test_a_margin_is_that_of_the_two_best_also_where_a_worse_token_was_sampled() -> None:
    logprobs = {7: SimpleNamespace(logprob=-2.0), 3: SimpleNamespace(logprob=-0.5), 4: SimpleNamespace(logprob=-0.75)}
    assert tokens_of(SimpleNamespace(token_ids=(7,), logprobs=[logprobs])) == [Token(7, 0.25)]


def test_random_prompts_grow_from_step_to_step() -> None:
    for pieces in random_prompts(2):
        assert all(after[: len(before)] == before for before, after in pairwise(pieces))
        assert len(pieces[-1]) == bfloat16.NUM_RANDOM_TOKENS
