"""The values that travel, and the longest common prefix."""

import doctest
import json
import math
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag import Chunk, Prompt, SamplingParams
from streamrag.core import common_prefix_len, part_name, protocols, values
from streamrag.errors import ConfigurationError
from streamrag.support.messages import short_repr

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_what_comparing_one_by_one_finds(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix_len(a, b) == expected
    assert common_prefix_len(tuple(a), tuple(b), start=expected // 2) == expected


def test_the_examples_in_docstrings_are_true() -> None:
    results = [doctest.testmod(module) for module in (values, protocols)]
    assert [(result.failed, result.attempted) for result in results] == [(0, 1), (0, 3)]


def test_values_are_frozen() -> None:
    for value, name in ((Chunk("text", "a.md"), "text"), (Prompt((1,), 0, True), "token_ids")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, 1.5, True, "5", None)),
        *(("temperature", value) for value in (-0.1, None, math.nan, math.inf, 10**400)),
        *(("top_p", value) for value in (0.0, 1.1, "1")),
        *(("top_k", value) for value in (-1, 1.5)),
        *(("seed", value) for value in ("x", 10**30, 1.0)),
        *(("stop", value) for value in ("END", 5, ("a", 5), ("",))),
        *(("stop", value) for value in (("x",) * 17, ("x" * 257,), ["x"] * 100_000)),
        *((name, 1 << 31) for name in ("max_tokens", "top_k")),
        ("ignore_eos", 1),
        ("extra", [1]),
    ],
    ids=lambda value: short_repr(value)[:20],
)
def test_sampling_parameters_that_no_engine_accepts_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^SamplingParams: {name}.*=.* must be|should have at"):
        SamplingParams(**{name: value})


def test_the_largest_allowed_number_of_stop_texts_is_taken() -> None:
    texts = tuple(f"{number:256}" for number in range(16))
    assert SamplingParams(stop=texts).stop == texts


def test_sampling_parameters_may_be_numpys_numbers_and_a_list_of_stop_texts() -> None:
    params = SamplingParams(numpy.int64(5), numpy.float32(0.5), stop=["END"])  # type: ignore[arg-type]
    assert params == SamplingParams(5, 0.5, stop=("END",))
    assert type(params.max_tokens) is int
    json.dumps([params.max_tokens, params.temperature])


class Named:
    def __init__(self, name: object) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("wiki", "wiki"),
        ("two\nlines\x1b[2J \u202e", "two lines [2J"),
        ("x" * 100_000, "x" * 80),
        ("", "Named"),
        (" \n", "Named"),
        (5, "Named"),
    ],
)
def test_a_part_is_called_by_its_name_in_one_short_line_or_by_its_class(name: object, called: str) -> None:
    assert part_name(Named(name)) == called
