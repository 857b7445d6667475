"""Request fields that several protocols share: messages, sampling parameters, and unsupported fields."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from streamrag.core import SamplingParams, Turn
from streamrag.serve.failures import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of each type of part."""

NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})  # values of unsupported fields that ask for nothing

ASKING_EMPTY = frozenset({"max_tool_calls", "moderation", "web_search_options"})
"""Fields that ask for something by 0 or {}: for no search, for a moderation, for a search."""

OPENAI = """
    access_programs audio background background_options context_management conversation frequency_penalty function_call
    functions image include input instructions logit_bias logprobs max_completion_tokens max_output_tokens max_tokens
    max_tool_calls messages moderation presence_penalty previous_response_id prompt reasoning reasoning_effort seed stop
    suffix text top_logprobs web_search_options
"""
VLLM = """
    add_special_tokens allowed_token_ids bad_words chat_template continue_final_message documents echo guided_choice
    guided_grammar guided_json guided_regex include_stop_str_in_output logits_processors min_tokens prompt_logprobs
    repetition_detection stop_token_ids structured_outputs thinking_token_budget truncate_prompt_tokens use_beam_search
    watermarking
"""
UNSUPPORTED: Mapping[str, Any] = dict.fromkeys((OPENAI + VLLM).split()) | {
    "add_generation_prompt": True, "best_of": 1, "length_penalty": 1, "modalities": ["text"], "n": 1,
    "repetition_penalty": 1, "response_format": {"type": "text"}, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "truncation": "disabled", "verbosity": "medium",
}  # fmt: skip
"""Fields that would change an answer, with the value that asks for nothing besides those of `NOTHING`. Requests that do
not define them refuse them by name; fields that are neither here nor defined are ignored."""

IGNORED_LOGGED = 1000  # maximum names of ignored fields that are logged, so that no client fills memory with new ones

Message = TypeVar("Message")

log = logging.getLogger("streamrag.serve")


class IgnoredFields:
    """A debug log of the fields that the service ignores, each once per client."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, client: str, names: Iterable[str]) -> None:
        """Log the names that were not logged for this client before."""
        new = {(client, f"{name:.80}") for name in names} - self._logged
        if new and len(self._logged) < IGNORED_LOGGED:
            self._logged |= new
            log.debug("fields of %s that are ignored: %s", client, ", ".join(sorted(name for _, name in new)))


def refuse_fields(request: BaseModel, harmless: AbstractSet[str], refused: Mapping[str, bool]) -> list[str]:
    """Return the names of unknown fields that ask for something and are ignored. Raise RequestError for the first
    unsupported field, which would change the answer.

    harmless: fields of OpenAI's that change no answer.
    refused: whether to refuse each of these fields.
    """
    asking = {
        name: value
        for name, value in (request.model_extra or {}).items()
        if value not in NOTHING or (name in ASKING_EMPTY and value in (0, {}) and value is not False)
    }
    unsupported = [name for name, value in asking.items() if value != UNSUPPORTED.get(name, value)]
    for name in (*unsupported, *(name for name, is_refused in refused.items() if is_refused)):
        raise RequestError(f"{name}: this service does not support it", code="unsupported_value", param=name)
    return [name for name in asking if name not in harmless and name not in UNSUPPORTED]


def message_text(content: object, param: str) -> str:
    """Return the text of a content: a str, "" for None, or joined text parts. Raises RequestError for anything else."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, Sequence):
        raise RequestError("the content must be a string or a list of text parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(part, Mapping) and isinstance(kind, str) else part
        if not isinstance(text, str):
            raise RequestError(f"a part of type {kind!r:.40}: this service reads text only", param=param)
        texts.append(text)
    return "".join(texts)


def parse_turn(role: str, content: object, param: str) -> Turn:
    """Return a message as a turn, a developer's as the system's. Raises RequestError for other roles or contents."""
    if role not in ROLES:
        raise RequestError(f"role={role!r:.40} must be one of {', '.join(ROLES)}", param=f"{param}.role")
    return Turn(ROLES[role], message_text(content, f"{param}.content"))  # type: ignore[arg-type]


def split_turns(turns: Sequence[Turn], param: str) -> tuple[str, tuple[Turn, ...], str]:
    """Return the leading system text, the turns between, and the text of the last user's turn, which is the question.

    Turns behind the question are those of `end_with_question`.

    :raises RequestError: there is no user's turn.
    """
    turns = end_with_question(turns, lambda turn: turn.role, param)
    num_system = next(i for i, turn in enumerate(turns) if turn.role != "system")
    system = "\n\n".join(turn.text for turn in turns[:num_system])
    return system, tuple(turns[num_system:-1]), turns[-1].text


def end_with_question(messages: Sequence[Message], role_of: Callable[[Message], str], param: str) -> list[Message]:
    """Return the messages up to the last user's or tool's. System messages behind it, as voice agents send them, follow
    the leading ones; answers behind it are left out, because it is answered anew.

    :raises RequestError: there is no user's message.
    """
    roles = [role_of(message) for message in messages]
    if "user" not in roles:
        raise RequestError("there must be a user's message: the last one is the question", param=param)
    end = max(i for i, role in enumerate(roles, 1) if role in ("user", "tool"))
    start = next(i for i, role in enumerate(roles) if role != "system")
    later = [message for message, role in zip(messages[end:], roles[end:], strict=True) if role == "system"]
    return [*messages[:start], *later, *messages[start:end]]


def sampling(default: SamplingParams, *, extra: Mapping[str, Any] | None = None, **fields: Any) -> SamplingParams:
    """Return `default` with the fields that are not None replaced. Raises ConfigurationError for invalid values."""
    changes = {name: value for name, value in fields.items() if value is not None}
    more = {name: value for name, value in (extra or {}).items() if value is not None}
    return replace(default, **changes, extra={**default.extra, **more})
