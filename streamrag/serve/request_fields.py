"""Request fields that several protocols share: messages, sampling parameters, and unsupported fields."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from streamrag.core import SamplingParams, Turn
from streamrag.serve.failures import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def refuse_fields(request: BaseModel, harmless: AbstractSet[str], refused: Mapping[str, bool]) -> None:
    """Raise RequestError for the first unsupported field, which could change the answer if it was ignored.

    harmless: unknown fields that may be ignored; so may any unknown field that is null, false or empty.
    refused: whether to refuse each of these fields.
    """
    unknown = {
        name: not (value is None or value is False or value in ("", []) or name in harmless)
        for name, value in (request.model_extra or {}).items()
    }
    for name, is_refused in {**unknown, **refused}.items():
        if is_refused:
            name = f"{name:.80}"
            raise RequestError(f"{name}: this service does not support it", code="unsupported_value", param=name)


def message_text(content: object, param: str) -> str:
    """Return the text of a content: a str, "" for None, or joined text parts. Raises RequestError for anything else."""
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
        raise RequestError("the content must be a string or a list of text parts", param=param)
    return "".join(texts)


def parse_turn(role: str, content: object, param: str) -> Turn:
    """Return a message as a turn, a developer's as the system's. Raises RequestError for other roles or contents."""
    if role not in ROLES:
        raise RequestError(f"role={role!r:.40} must be one of {', '.join(ROLES)}", param=f"{param}.role")
    return Turn(ROLES[role], message_text(content, f"{param}.content"))  # type: ignore[arg-type]


def split_turns(turns: Sequence[Turn], param: str) -> tuple[str, tuple[Turn, ...], str]:
    """Return the leading system text, the turns between, and the question. Raises RequestError if none is last."""
    if not turns or turns[-1].role != "user":
        raise RequestError("the last message must be a user's: it is the question", param=param)
    num_system = next(i for i, turn in enumerate(turns) if turn.role != "system")
    system = "\n\n".join(turn.text for turn in turns[:num_system])
    return system, tuple(turns[num_system:-1]), turns[-1].text


def sampling(default: SamplingParams, *, extra: Mapping[str, Any] | None = None, **fields: Any) -> SamplingParams:
    """Return `default` with the fields that are not None replaced. Raises ConfigurationError for invalid values."""
    changes = {name: value for name, value in fields.items() if value is not None}
    more = {name: value for name, value in (extra or {}).items() if value is not None}
    return replace(default, **changes, extra={**default.extra, **more})
