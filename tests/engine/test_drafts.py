"""Which tokens of a draft, or of the prompt, are verified next."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamrag.engine.drafts import LEAST_DEPTH, AnswerDraft, DraftSurvival

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def words(text: str) -> list[int]:
    """A token for each letter."""
    return [ord(letter) for letter in text]


def rest(draft: str, answer: str, most: int = 99, prompt: str = "") -> str:
    """What is verified after this answer, all of which comes at once."""
    return "".join(map(chr, AnswerDraft(words(draft), 99, words(prompt)).next_tokens(words(answer), most)))


def steps(draft: Sequence[int], answer: Sequence[int], depth: int, prompt: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The tokens verified in each step, and those that were right, of a model that always gives this answer."""
    following = AnswerDraft(draft, depth, prompt)
    taken = [(0, 0)]  # the step that computes the end of the prompt gives the first token
    num_shown = 1
    while num_shown < len(answer):
        guesses = following.next_tokens(answer[:num_shown], len(answer) - num_shown - 1)
        pairs = zip(guesses, answer[num_shown:], strict=False)
        num_right = next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(guesses))
        taken.append((len(guesses), num_right))
        num_shown += num_right + 1
    return taken


def test_the_draft_is_followed_from_where_the_answer_is() -> None:
    assert rest("the cat sat", "") == "the cat sat"
    assert rest("the cat sat", "the ") == "cat sat"
    assert rest("the cat sat", "the ", most=3) == "cat"
    assert rest("the cat sat", "the cat sat") == ""
    assert rest("the cat sat", "the cat sat on") == ""
    assert rest("", "the") == ""


def test_an_answer_that_left_the_draft_is_found_again_by_three_tokens() -> None:
    draft = "the cat sat on the mat"
    assert rest(draft, "the dog s") == ""
    assert rest(draft, "the dog sa") == "t on"
    assert AnswerDraft(words(draft), 99).continue_from(words("the dog sat")) == tuple(words("the dog sat on the mat"))
    assert rest(draft, "a c") == ""


def test_a_draft_continues_at_the_next_matching_place_else_the_first() -> None:
    draft = "one two, one ten"
    assert AnswerDraft(words(draft), 99).continue_from(words("xone")) == tuple(words("xone two, one ten"))
    assert AnswerDraft(words(draft), 99).continue_from(words("one two! one")) == tuple(words("one two! one ten"))


def test_a_draft_that_is_right_takes_one_step_and_one_that_is_wrong_at_once_costs_nothing() -> None:
    answer = list(range(100))
    assert steps(answer, answer, 99) == [(0, 0), (98, 98)]
    assert {num for num, _ in steps([777] * 100, answer, 99)} == {0}


def test_after_an_error_few_tokens_are_verified_and_then_twice_as_many_each_time() -> None:
    answer = list(range(100))
    changed = [*answer[:10], 777, *answer[11:]]
    first, *others = steps(changed, answer, 32)[1:]
    assert first == (32, 9)
    assert [each for each in others if each[0]] == [(LEAST_DEPTH, 4), (8, 8), (16, 16), (32, 32), (21, 21)]


def test_an_answer_that_begins_anew_is_followed_from_the_start() -> None:
    draft = AnswerDraft(words("the cat sat"), 99)
    assert draft.next_tokens(words("the c"), 99) == words("at sat")
    assert draft.next_tokens(words("the"), 99) == words(" cat sat")


def test_without_a_draft_the_answer_copies_what_follows_its_last_three_tokens_in_the_prompt() -> None:
    prompt = "the cat sat on the mat"
    assert rest("", "a", prompt=prompt) == ""
    assert rest("", "a cat", prompt=prompt) == " sat"
    assert rest("", "a dog", prompt=prompt) == ""
    assert rest("", "a mat", prompt=prompt) == ""


def test_the_prompt_is_searched_only_where_the_draft_has_nothing() -> None:
    draft, prompt = "the cat slept", "on the mat the cat sat down"
    assert rest(draft, "the cat", prompt=prompt) == " slept"
    assert rest(draft, "the dog and the cat", prompt=prompt) == " sle"
    assert rest(draft, "the cat slept on", prompt=prompt) == ""
    assert rest(draft, "the cat slept on t", prompt=prompt) == "he m"


def test_the_next_matching_place_after_the_last_quotation_is_copied() -> None:
    prompt = "(a) one two. (b) one ten. (c) one six."
    assert rest("", "one", prompt=prompt) == " two"
    assert rest("", "(b) one", prompt=prompt) == " ten"
    assert rest("", "(b) one! one", prompt=prompt) == " six"
    assert rest("", "(c) one! one", prompt=prompt) == " two"


def test_a_copy_begins_with_few_tokens_and_takes_twice_as_many_whenever_all_hold() -> None:
    prompt = list(range(1_000, 1_200))
    answer = [1, 2, 3, *prompt[50:150], 4, 5, 6]
    taken = [each for each in steps([], answer, 32, prompt) if each[0]]
    assert taken[:5] == [(LEAST_DEPTH, 4), (8, 8), (16, 16), (32, 32), (32, 32)]
    assert len(taken) == 6


def test_a_search_in_a_long_prompt_copies_nothing_of_it_and_finds_the_last_of_many_places() -> None:
    prompt = [*[5, 6, 7, 8] * 25_000, 9]
    draft = AnswerDraft((), 4, prompt)
    assert draft.next_tokens([5, 6, 7], 4) == [8, 5, 6, 7]
    assert draft.next_tokens([5, 6, 7, 8, 5, 6, 7, 9], 4) == []
    assert draft.next_tokens([5, 6, 7, 8, 5, 6, 7, 9, 8, 9], 4) == []
    assert AnswerDraft((), 4, prompt).next_tokens([7, 8, 9], 4) == []


@given(draft=TOKENS, answer=TOKENS.filter(bool), depth=st.integers(1, 12), prompt=TOKENS)
def test_no_draft_takes_more_steps_than_an_answer_without_one(
    draft: list[int], answer: list[int], depth: int, prompt: list[int]
) -> None:
    taken = steps(draft, answer, depth, prompt)
    assert len(taken) <= len(answer)
    assert all(num <= depth for num, _ in taken)


@given(draft=TOKENS, answer=TOKENS)
def test_the_whole_rest_of_a_draft_continues_the_answer(draft: list[int], answer: list[int]) -> None:
    whole = AnswerDraft(draft, 1).continue_from(answer)
    assert list(whole[: len(answer)]) == answer
    tail = whole[len(answer) :]
    assert not tail or tuple(draft[-len(tail) :]) == tail


def test_the_share_of_drafted_tokens_that_hold_is_learned_from_what_ends() -> None:
    survival = DraftSurvival()
    assert survival() == 0.5
    for _ in range(100):
        survival.on_draft(30)
        survival.on_draft(10)
        survival.on_answer(8)
    assert survival() == pytest.approx(8 / 40, rel=1e-3)
    for _ in range(100):
        survival.on_answer(8)  # drafts that clients had
    assert survival() == 1
    for _ in range(10_000):
        survival.on_answer(0)  # so many that nothing is left of what was sampled
    assert survival() == pytest.approx(0)
