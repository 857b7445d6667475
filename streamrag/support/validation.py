"""Checks of arguments by their annotations, with pydantic; its errors become ConfigurationError here and nowhere else.

@validated
@dataclass(frozen=True)
class CrawlLimits:
    max_pages: Count = 100
    timeout_s: Seconds | None = 30.0
    depth: Annotated[int, Field(ge=0, le=20)] = 2
"""

import builtins
from collections.abc import Callable, Sequence
from functools import cache, wraps
from inspect import signature
from itertools import pairwise
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from streamrag.errors import ConfigurationError
from streamrag.support.messages import plain_text, short

T = TypeVar("T", bound=Callable[..., Any])

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""A text is no number, and True is none."""


def _plain(value: object) -> object:
    """Return numpy's and others' numbers as Python's own."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


Text = Annotated[str, BeforeValidator(lambda value: plain_text(value) if isinstance(value, str) else value)]
Whole = Annotated[int, BeforeValidator(_plain)]
Number = Annotated[float, BeforeValidator(_plain)]
Count = Annotated[Whole, Field(ge=1)]
CountOrZero = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Seconds = Positive
NumberOrZero = Annotated[Number, Field(ge=0)]
SecondsOrZero = NumberOrZero
Fraction = Annotated[Number, Field(ge=0, le=1)]
PositiveFraction = Annotated[Number, Field(gt=0, le=1)]
Flag = Annotated[bool, Field()]
NonEmptyText = Annotated[Text, Field(min_length=1)]


def _growing(values: Sequence[int]) -> Sequence[int]:
    if any(a >= b for a, b in pairwise(values)):
        raise ValueError("must be growing")
    return values


GrowingCounts = Annotated[Sequence[Count], AfterValidator(_growing)]


def validated(checked: T) -> T:
    """Check the arguments of a constructor, a function, or a class's constructor, and pass on the values.

    Only arguments whose annotation has an `Annotated` or a `Literal` in it are checked.

    :raises ConfigurationError: an argument is not as annotated; the message says which, its value and what it must be.
    """
    if isinstance(checked, type):
        checked.__init__ = validated(checked.__init__)  # type: ignore[misc]
        return checked
    parameters = signature(checked)
    owner = f"{checked.__qualname__.split('.')[-2]}: " if checked.__name__ == "__init__" else ""

    @cache
    def adapters() -> dict[str, TypeAdapter[Any]]:  # when first called: annotations may name what is defined later
        hints = _hints(checked).items()
        return {name: _adapter(hint) for name, hint in hints if _has_constraint(hint)}

    @wraps(checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError:
            return checked(*args, **kwargs)  # says it in Python's own words
        for name in bound.arguments.keys() & adapters().keys():
            bound.arguments[name] = check(f"{owner}{name}", bound.arguments[name], adapters()[name])
        return checked(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def check(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    """Return `value` as `adapter` has it.

    :raises ConfigurationError: it is not valid; the message begins with `name`.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigurationError(describe(name, error)) from None


def describe(name: str, error: ValidationError) -> str:
    """Return what is wrong, in one line: each part that is wrong, its value, and what it must be."""
    lines: dict[str, list[str]] = {}
    for each in error.errors(include_url=False, include_context=False):
        # Of alternatives, as in `int | None`, pydantic names each one that does not match.
        where = "".join(f"[{part!r}]" for part in each["loc"] if isinstance(part, int))
        must_be = each["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        lines.setdefault(f"{name}{where}={short(each['input'])}", []).append(must_be)
    return "; ".join(f"{what} {', or '.join(dict.fromkeys(rules))}" for what, rules in lines.items())


class _Names(dict[str, Any]):
    """Names that annotations use. One that is imported for a type checker alone is `Any`."""

    def __missing__(self, name: str) -> Any:
        return Any


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    names = _Names({**vars(builtins), **function.__globals__})
    return get_type_hints(function, localns=names, include_extras=True)


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=STRICT)
    except PydanticUserError:  # a dataclass or a model has a configuration of its own
        return TypeAdapter(hint)


def _has_constraint(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal) or any(map(_has_constraint, get_args(hint)))
