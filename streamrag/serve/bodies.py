"""Reading what clients send: JSON objects, and the fields of OpenAI's requests that several interfaces have."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from streamrag.core import SamplingParams, Turn
from streamrag.serve.failures import RequestError

M = TypeVar("M", bound=BaseModel)

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class StrictModel(BaseModel):
    """A base of what clients send. It refuses unknown fields: to ignore one could change the answer."""

    model_config = ConfigDict(extra="forbid")


async def read_body(request: Request, model: type[M]) -> M:
    """The request's body as `model`.

    :raises RequestError: it is no JSON object, or not such a one; says where.
    """
    return parsed(await request.body(), model)


def parsed(body: bytes | str, model: type[M]) -> M:
    """`body` as `model`.

    :raises RequestError: it is no JSON object, or not such a one; says where.
    """
    try:
        # No half characters, as json.loads has them, and no NaN, which no answer can hold.
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where}: {first['msg']}" if where else first["msg"], param=where or None) from None


def refuse_fields(request: BaseModel, harmless: AbstractSet[str], refused: Mapping[str, bool]) -> None:
    """Refuse the fields of `refused` that are true, and unknown ones that ask for something, but for harmless ones.

    :raises RequestError: there is one; it would change the answer, and be ignored.
    """
    unknown = {
        name: not (value is None or value is False or value in ("", []) or name in harmless)
        for name, value in (request.model_extra or {}).items()
    }
    for name, is_refused in {**unknown, **refused}.items():
        if is_refused:
            name = f"{name:.80}"
            raise RequestError(f"{name}: this service does not do that", code="unsupported_value", param=name)


def text_of(content: object, param: str) -> str:
    """The text of a message's content: a text, or parts of text.

    :raises RequestError: there is something else in it.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    texts = []
    for part in content if isinstance(content, Sequence) else ():
        if not (isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"a part of type {kind!r:.40}: this service reads text only", param=param)
        texts.append(part["text"])
    if not texts:
        raise RequestError("the content must be a text, or a list of parts of text", param=param)
    return "".join(texts)


def turn_of(role: str, content: object, param: str) -> Turn:
    """One message.

    :raises RequestError: a role or a content that this service does not have.
    """
    if role not in ROLES:
        raise RequestError(f"role={role!r:.40} must be one of {', '.join(ROLES)}", param=f"{param}.role")
    return Turn(ROLES[role], text_of(content, f"{param}.content"))  # type: ignore[arg-type]


def split_turns(turns: Sequence[Turn], param: str) -> tuple[str, tuple[Turn, ...], str]:
    """System texts in front, the turns between, and the question, which is the last user message.

    :raises RequestError: the last message is not a user's.
    """
    if not turns or turns[-1].role != "user":
        raise RequestError("the last message must be a user's: it is the question", param=param)
    num_system = next(i for i, turn in enumerate(turns) if turn.role != "system")
    system = "\n\n".join(turn.text for turn in turns[:num_system])
    return system, tuple(turns[num_system:-1]), turns[-1].text


def sampling(default: SamplingParams, **given: Any) -> SamplingParams:
    """`default`, with what the client gave; what it gave as null is not given."""
    named = {name: value for name, value in given.items() if value is not None and name != "extra"}
    extra = {name: value for name, value in given.get("extra", {}).items() if value is not None}
    return replace(default, **named, extra={**default.extra, **extra})
