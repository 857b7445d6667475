from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.backends.vllm.chunk_wire import (
    KEY,
    LONGEST_DRAFT,
    LONGEST_NAME,
    EndOfInput,
    MalformedMessageError,
    PromptMessage,
    decode,
)
from streamrag.core import Prompt

CHUNK = PromptMessage(3, 20, False, 1.5, 2.5, "crawl")
FIELDS: dict[str, Any] = CHUNK.extra_args()[KEY]
DEEP: Any = {}
for _ in range(5_000):
    DEEP = {"index": DEEP}


@pytest.mark.parametrize("message", [CHUNK, replace(CHUNK, arrival_s=None, expected_complete_s=0), EndOfInput()])
def test_a_decoded_message_equals_the_one_that_was_sent(message: PromptMessage | EndOfInput) -> None:
    assert decode({"other": 1, **message.extra_args()}) == message


@pytest.mark.parametrize("hint", [float("nan"), float("inf"), -1.0])
def test_a_retriever_that_expects_nonsense_expects_nothing(hint: float) -> None:
    assert decode(replace(CHUNK, expected_complete_s=hint).extra_args()) == replace(CHUNK, expected_complete_s=None)


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 5}, {KEY: None}, 5, [KEY]])
def test_a_plain_request_says_nothing_of_ours(extra_args: Any) -> None:
    assert decode(extra_args) is None


MALFORMED: dict[str, Any] = {
    "a number": 5,
    "zero": 0,
    "a list": [1, 2],
    "an empty list": [],
    "a text": "index",
    "nothing": {},
    "an end that is none": {"is_end": 1},
    "an end and more": {"is_end": True, "index": 0},
    "a missing field": {"index": 0, "num_kept": 0},
    "an unknown field": {**FIELDS, "mode": "append"},
    "fields that are no text": {**FIELDS, 5: 5},
    "a negative index": {**FIELDS, "index": -1},
    "an index of true": {**FIELDS, "index": True},
    "half an index": {**FIELDS, "index": 0.5},
    "an index in words": {**FIELDS, "index": "0"},
    "a negative count": {**FIELDS, "num_kept": -1},
    "a count of nothing": {**FIELDS, "num_kept": None},
    "a final of 1": {**FIELDS, "is_complete": 1},
    "not a number": {**FIELDS, "arrival_s": float("nan")},
    "infinity": {**FIELDS, "expected_complete_s": float("inf")},
    "a huge number": {**FIELDS, "arrival_s": 10**400},
    "before the clock was started": {**FIELDS, "arrival_s": -1e300},
    "a time in words": {**FIELDS, "arrival_s": "1.5"},
    "a source that is none": {**FIELDS, "source_name": None},
    "an endless source": {**FIELDS, "source_name": "a" * (LONGEST_NAME + 1)},
    "depth": DEEP,
    "a deep field": {**FIELDS, "index": DEEP},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_fields_are_refused_in_a_short_message(fields: Any) -> None:
    with pytest.raises(MalformedMessageError, match="extra_args") as caught:
        decode({KEY: fields})
    assert len(str(caught.value)) < 250


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*FIELDS, "is_end", "x"]), inner),
    max_leaves=8,
)


@given(ANYTHING, st.dictionaries(st.sampled_from([*FIELDS]), ANYTHING))
def test_any_fields_are_decoded_without_loss_or_refused(fields: Any, changed: dict[str, Any]) -> None:
    for each in (fields, {**FIELDS, **changed}):
        try:
            message = decode({KEY: each})
        except MalformedMessageError:
            continue
        assert message is None or isinstance(message, EndOfInput) or message.extra_args() == {KEY: {**FIELDS, **each}}


def test_a_draft_is_a_list_of_tokens_of_bounded_length() -> None:
    message = PromptMessage.of(Prompt((7,) * 5, draft=(1, 2), is_complete=True), 0, 1.0)
    assert decode(message.extra_args()) == message
    longest = PromptMessage.of(Prompt((7,), draft=tuple(range(LONGEST_DRAFT + 9))), 0, 1.0).draft
    assert longest == list(range(LONGEST_DRAFT))
    for wrong in ("ab", 5, None, [-1], [1.5], ["1"], [True], [[1]], {}, [1] * (LONGEST_DRAFT + 1), [1 << 64]):
        with pytest.raises(MalformedMessageError, match="draft"):
            decode({KEY: {**message.extra_args()[KEY], "draft": wrong}})
