"""Validation of arguments against their annotations, with pydantic; only this module raises its ConfigurationErrors.

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
from streamrag.support.messages import plain_text, short_repr

T = TypeVar("T", bound=Callable[..., Any])

STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # neither a str nor a bool is a number


def _plain(value: object) -> object:
    """Return a number of numpy or another library as an int or float, and any other value as it is."""
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
PositiveFraction = Annotated[Number, Field(gt=0, le=1)]
Flag = Annotated[bool, Field()]
NonEmptyText = Annotated[Text, Field(min_length=1)]


def _check_growing(values: Sequence[int]) -> Sequence[int]:
    """Return the values; raise ValueError unless each is greater than the one before."""
    if any(a >= b for a, b in pairwise(values)):
        raise ValueError("must be growing")
    return values


GrowingCounts = Annotated[Sequence[Count], AfterValidator(_check_growing)]


def validated(checked: T) -> T:
    """Decorate a function or a class so that its arguments are checked and converted to the annotated types.

    Only arguments whose annotation contains an `Annotated` or a `Literal` are checked.

    :raises ConfigurationError: an argument is invalid; the message has its name, its value and what it must be.
    """
    if isinstance(checked, type):
        checked.__init__ = validated(checked.__init__)  # type: ignore[misc]
        return checked
    parameters = signature(checked)
    owner = f"{checked.__qualname__.split('.')[-2]}: " if checked.__name__ == "__init__" else ""

    @cache
    def adapters() -> dict[str, TypeAdapter[Any]]:  # on the first call: annotations may be forward references
        names = _Names({**vars(builtins), **checked.__globals__})
        hints = get_type_hints(checked, localns=names, include_extras=True)
        return {name: _adapter(hint) for name, hint in hints.items() if _has_constraint(hint)}

    @wraps(checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError:
            return checked(*args, **kwargs)  # raises Python's own message
        for name in bound.arguments.keys() & adapters().keys():
            bound.arguments[name] = check(f"{owner}{name}", bound.arguments[name], adapters()[name])
        return checked(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def check(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    """Return `value` validated by `adapter`; raise ConfigurationError, which begins with `name`, if it is invalid."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigurationError(describe(name, error)) from None


def describe(name: str, error: ValidationError) -> str:
    """Return one line with each invalid part, its value, and what it must be."""
    lines: dict[str, list[str]] = {}
    for each in error.errors(include_url=False, include_context=False):
        # For a union such as `int | None`, pydantic reports each member that does not match.
        where = "".join(f"[{part!r}]" for part in each["loc"] if isinstance(part, int))
        must_be = each["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        lines.setdefault(f"{name}{where}={short_repr(each['input'])}", []).append(must_be)
    return "; ".join(f"{what} {', or '.join(dict.fromkeys(rules))}" for what, rules in lines.items())


class _Names(dict[str, Any]):
    """A namespace for annotations, in which names imported only for type checkers are `Any`."""

    def __missing__(self, name: str) -> Any:
        return Any


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Return a strict adapter for a type; for a class whose configuration pydantic lets only the class itself set (a
    model or dataclass), one with that configuration, strict or not."""
    try:
        return TypeAdapter(hint, config=STRICT)
    except PydanticUserError:  # a dataclass or a model has its own configuration
        return TypeAdapter(hint)


def _has_constraint(hint: Any) -> bool:
    """Whether an annotation has an `Annotated` or a `Literal` at any depth."""
    return get_origin(hint) in (Annotated, Literal) or any(map(_has_constraint, get_args(hint)))
