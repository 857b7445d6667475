"""Drafts of answers: verified by the scheduler, and computed only while nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

Make = Callable[..., Any]
PROMPT = list(range(30))
LENGTH = 40


@pytest.fixture
def drafting(bench: Make) -> Make:
    """An engine that verifies at most so many tokens a step."""

    def make(num_draft_tokens: int = 16, **limits: Any) -> Any:
        return bench(num_draft_tokens=num_draft_tokens, **limits)

    return make


def num_steps(b: Any, draft: list[int], **fields: Any) -> int:
    """How many steps an answer takes with this draft. It must be the answer without one."""
    name, before = f"s{len(b.outputs)}", b.engine.num_steps
    b.chunk(name, PROMPT, is_complete=True, max_tokens=LENGTH, draft=draft, **fields)
    b.run()
    assert b.tokens(name) == b.fresh_answer(PROMPT, LENGTH)
    return b.engine.num_steps - before


def test_a_right_draft_is_verified_in_few_steps_and_the_record_counts_its_tokens(drafting: Make) -> None:
    b = drafting(max_num_batched_tokens=64)
    answer = b.fresh_answer(PROMPT, LENGTH)
    assert num_steps(b, []) >= LENGTH
    assert num_steps(b, answer) <= 1 + 3 + 1
    record = b.record(b.outputs[-1].request_id)
    assert (record.num_verified, record.num_accepted) == (LENGTH - 1 - 3, LENGTH - 1 - 3)


def test_a_wrong_draft_changes_nothing(drafting: Make) -> None:
    b = drafting(max_num_batched_tokens=64)
    answer = b.fresh_answer(PROMPT, LENGTH)
    changed = [*answer[:20], (answer[20] + 1) % 1_000, *answer[21:]]
    for draft in (changed, answer[1:], answer[:5], answer * 2, [7] * 60, [0]):
        assert num_steps(b, draft) <= LENGTH + 2


@pytest.mark.parametrize("num_behind", [0, 1, 10])
def test_a_stop_token_within_a_draft_ends_the_answer_there(drafting: Make, num_behind: int) -> None:
    b = drafting(max_num_batched_tokens=64)
    answer = b.fresh_answer(PROMPT, LENGTH)
    number = next(i for i in range(20, LENGTH) if answer[i] not in answer[:i])
    draft = answer[: number + 1 + num_behind]
    b.chunk("s", PROMPT, is_complete=True, max_tokens=LENGTH, draft=draft, stop_token_ids=[answer[number]])
    b.run()
    assert b.tokens("s") == answer[: number + 1]
    assert b.record("s").num_verified > number / 2


def test_a_step_verifies_no_more_than_its_budget_and_the_free_blocks_allow(drafting: Make) -> None:
    answer = drafting().fresh_answer(PROMPT, LENGTH)
    for limits in ({"max_num_batched_tokens": 5}, {"num_blocks": 50}, {"num_blocks": 18, "max_model_len": 72}):
        b = drafting(**limits)
        for name in "ab":
            b.chunk(name, PROMPT, is_complete=True, max_tokens=LENGTH, draft=answer)
        b.run()
        assert b.tokens("a") == b.tokens("b") == answer


def test_the_end_of_the_answer_and_of_the_model_bounds_what_is_verified(drafting: Make) -> None:
    answer = drafting().fresh_answer(PROMPT, LENGTH)
    b = drafting(max_model_len=len(PROMPT) + 10)
    b.chunk("long", PROMPT, is_complete=True, max_tokens=LENGTH, draft=answer)
    b.chunk("short", PROMPT, is_complete=True, max_tokens=3, draft=answer)
    b.run()
    assert b.tokens("long") == answer[:10]
    assert b.tokens("short") == answer[:3]
    assert (b.record("long").num_verified, b.record("short").num_verified) == (8, 1)


def test_a_draft_comes_with_the_last_chunk_and_is_ignored_by_an_engine_that_verifies_none(bench: Make) -> None:
    for num_draft_tokens, most_steps in ((16, 12), (0, LENGTH + 8)):
        b = bench(num_draft_tokens=num_draft_tokens)
        answer = b.fresh_answer(PROMPT, LENGTH)
        b.chunk("s", PROMPT[:20])
        b.run()
        b.chunk("s", PROMPT[20:], kept=20, is_complete=True, max_tokens=LENGTH, draft=answer)
        before = b.engine.num_steps
        b.run()
        assert b.tokens("s") == answer
        assert b.engine.num_steps - before <= most_steps


def test_a_draft_with_a_token_that_the_model_does_not_have_fails_its_request_only(drafting: Make) -> None:
    b = drafting()
    b.chunk("wrong", PROMPT, is_complete=True, draft=[3, 1_000])
    b.chunk("right", PROMPT, is_complete=True, draft=[3, 999])
    b.run()
    assert b.tokens("wrong") == []
    assert "a token that the model does not have" in str(b.outputs)
    assert b.tokens("right") == b.fresh_answer(PROMPT)


def test_an_answer_with_a_grammar_has_no_draft(drafting: Make) -> None:
    b = drafting()
    constrained = StructuredOutputsParams(regex="[a-z]*")
    b.chunk("s", PROMPT, is_complete=True, structured_outputs=constrained, draft=[1, 2, 3])
    assert b.scheduler.requests["s"].draft is None


def test_an_answer_with_a_grammar_copies_nothing_nor_does_one_to_a_prompt_with_images(
    drafting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = drafting()
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
    b.engine.add("grammar", PROMPT, params)
    b.plain("text", 30)
    with monkeypatch.context() as patch:
        patch.setattr(Request, "has_encoder_inputs", True)
        b.plain("image", 30)
    requests = b.scheduler.requests
    assert requests["grammar"].draft is None
    assert requests["text"].draft.next_tokens([5, 6, 7], 4) == [8, 9, 10, 11]
    assert requests["image"].draft.next_tokens([5, 6, 7], 4) == []


@pytest.mark.parametrize("prompt_lookup", [True, False])
def test_an_answer_without_a_draft_copies_from_its_prompt_unless_that_is_switched_off(
    drafting: Make, prompt_lookup: bool
) -> None:
    b = drafting(streamrag={"prompt_lookup": prompt_lookup}, max_num_batched_tokens=64)
    b.runner.vocabulary = 2
    prompt = [0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0] * 2
    b.engine.add("plain", prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0))
    b.chunk("stream", prompt, is_complete=True, max_tokens=LENGTH)
    b.run()
    assert b.tokens("plain") == b.tokens("stream")
    for record in map(b.record, ("plain", "stream")):
        assert (record.num_copied > 5) == prompt_lookup
        assert (record.num_copies_verified > record.num_copied) == prompt_lookup
        assert record.num_verified == 0


def test_an_answer_copies_from_the_last_prompt_of_its_stream(drafting: Make) -> None:
    b = drafting()
    b.chunk("s", [9] * 20)
    b.run()
    b.chunk("s", PROMPT, is_complete=True)
    assert b.scheduler.requests["s"].draft.next_tokens([9, 9, 9], 4) == []
    assert b.scheduler.requests["s"].draft.next_tokens([9, 9, 9, 10, 11, 12], 4) == [13, 14, 15, 16]


def test_drafts_compute_only_while_nothing_else_does_and_keep_what_they_have(drafting: Make) -> None:
    b = drafting(num_draft_tokens=4)
    b.chunk("draft", PROMPT, is_complete=True, max_tokens=20, request_class="draft")
    for _ in range(6):
        b.step()
    shown = len(b.tokens("draft"))
    assert shown > 0
    b.plain("answer", 30, first=500, max_tokens=10)
    b.chunk("partial", list(range(700, 730)))
    while b.num_finishes("answer") == 0:
        computed = {o.request_id for o in b.step()}
        assert "draft" not in computed
    b.run()
    assert b.tokens("draft") == b.fresh_answer(PROMPT, 20)


def test_a_draft_gives_up_its_slot_and_its_memory_and_goes_on_later(drafting: Make) -> None:
    for limits in ({"max_num_seqs": 1}, {"num_blocks": 12, "max_model_len": 48}):
        b = drafting(**limits)
        b.chunk("draft", PROMPT, is_complete=True, max_tokens=10, request_class="draft")
        for _ in range(4):
            b.step()
        b.plain("answer", 30, first=500, max_tokens=10)
        while not b.num_finishes("answer"):
            b.step()
        assert b.num_finishes("draft") == 0
        b.run()
        assert b.tokens("draft") == b.fresh_answer(PROMPT, 10)


def test_a_draft_verifies_an_earlier_draft(drafting: Make) -> None:
    b = drafting(max_num_batched_tokens=64)
    assert num_steps(b, b.fresh_answer(PROMPT, LENGTH), request_class="draft") <= 6


def test_a_draft_computes_in_short_steps(drafting: Make) -> None:
    b = drafting(max_num_batched_tokens=1_000, max_model_len=1_000, num_blocks=400)
    b.plain("first", 500, first=0)  # so that the engine's speed is known: 500 tokens a second
    b.run()
    b.chunk("draft", list(range(300, 900)), is_complete=True, request_class="draft")
    assert b.engine.launch() is not None
    assert b.scheduler.requests["draft"].num_computed_tokens == 128
