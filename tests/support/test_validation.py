"""Arguments are checked by their annotations, and errors name the argument, its value and what it must be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import Field

from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, PositiveFraction, Seconds, validated


@validated
@dataclass(frozen=True, slots=True)
class Options:
    num: Count = 3
    timeout_s: Seconds | None = None
    mode: Literal["fast", "exact"] = "fast"
    names: Sequence[Annotated[str, Field(min_length=1)]] = ()


class Source:
    @validated
    def __init__(self, url: str, *, k: Count = 5, share: PositiveFraction | None = None) -> None:
        self.url, self.k, self.share = url, k, share


def test_valid_arguments_arrive_as_they_are_and_numbers_of_numpy_as_python_s_own() -> None:
    options = Options(np.int64(4), np.float32(2), "exact", ["a"])  # type: ignore[arg-type]
    assert options == Options(num=4, timeout_s=2.0, mode="exact", names=["a"])
    assert type(options.num) is int
    source = Source("x", k=2)
    assert (source.url, source.k, source.share) == ("x", 2, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Options(0), "num=0 must be greater than or equal to 1"),
        (lambda: Options(True), "num=True must be a valid integer"),
        (lambda: Options(num="3"), "num='3' must be a valid integer"),  # type: ignore[arg-type]
        (lambda: Options(timeout_s=-1), "timeout_s=-1 must be greater than 0"),
        (lambda: Options(timeout_s=float("nan")), "timeout_s=nan must be a finite number"),
        (lambda: Options(timeout_s=10**400), "timeout_s=10000"),
        (lambda: Options(mode="slow"), "mode='slow' must be 'fast' or 'exact'"),  # type: ignore[arg-type]
        (lambda: Options(names="abc"), "names='abc' 'str' instances are not allowed"),
        (lambda: Options(names=["a", ""]), r"names\[1\]='' String should have at least 1 character"),
        (lambda: replace(Options(), num=-1), "num=-1 must be"),
        (lambda: Source("x", k=2.5), "k=2.5 must be a valid integer"),  # type: ignore[arg-type]
        (lambda: Source("x", share=1.5), "share=1.5 must be less than or equal to 1"),
    ],
)
def test_an_invalid_argument_is_named_with_its_value_and_what_it_must_be(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^(Options|Source): {message}"):
        make()


def test_a_missing_or_unknown_argument_is_told_in_the_words_of_python() -> None:
    with pytest.raises(TypeError, match=r"Source.__init__\(\) missing 1 required positional argument: 'url'"):
        Source()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        Source("x", x=1)  # type: ignore[call-arg]


class Recorded:
    @validated
    def __init__(self, recorder: "Recorder", num: Count = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.recorder, self.num = recorder, num


def test_only_types_imported_for_a_type_checker_alone_are_not_checked() -> None:
    assert Recorded(object(), 2).num == 2
    with pytest.raises(ConfigurationError, match="Recorded: num=0"):
        Recorded(object(), 0)
