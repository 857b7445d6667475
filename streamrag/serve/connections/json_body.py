"""JSON that clients send, in bodies and frames, parsed into pydantic models with bounded CPU time.

A megabyte of JSON can hold 350,000 lists, which take 120 ms to parse, or half a million values of a wrong type, which
take more than a second to describe, and block the event loop meanwhile. Therefore the number of values is bounded,
error reports are bounded, and large bodies of one client are parsed in turn, with pauses.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import Request

from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.failures import RequestError
from streamrag.trace.events import first_error

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

SMALL_BYTES = 16_384  # bytes of JSON that are parsed immediately: at most 2 ms

MAX_VALUES = 32_768
"""Values in a body, a frame or a line: at most 11 ms of parsing. An update of 4,096 chunks has 25,000."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each text

MAX_WAITING = 32  # large bodies of one client that may wait to be parsed


class RequestModel(BaseModel):
    """A base of requests, in which a field that is null counts as missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict) and None in values.values():
            return {name: value for name, value in values.items() if value is not None}
        return values


class StrictModel(RequestModel):
    """A base of requests that rejects unknown fields: ignoring one could change the answer."""

    model_config = ConfigDict(extra="forbid")


async def read_body(request: Request, model: type[M]) -> M:
    """Return the body as `model`, large ones in turn. Raises RequestError if it is invalid, or too many bodies wait."""
    body = await request.body()
    if len(body) <= SMALL_BYTES:
        return parse(body, model)
    return await parse_in_turn(body, model, request.scope[CALLER].account)


async def checked_body(request: Request, max_values: int) -> bytes:
    """Return the request's body for a library that parses it; charge a large one as if it was parsed here.

    Invalid JSON is left to the library. Raises RequestError if the body has more than `max_values` values, or if too
    many bodies wait.
    """
    body = await request.body()

    def check() -> None:
        check_num_values(body, max_values)
        with suppress(ValueError):
            from_json(body)

    if len(body) > SMALL_BYTES:
        await _in_turn(check, request.scope[CALLER].account)
    else:
        check_num_values(body, max_values)
    return body


async def parse_in_turn(body: bytes, model: type[M], account: Account) -> M:
    """Return `body` as `model`, parsed after earlier large bodies of the account and their pauses."""
    return await _in_turn(lambda: parse(body, model), account)


async def parse_frame(frame: str | bytes, work: Callable[[str | bytes], T], client: Account, socket: Account) -> T:
    """Return `work(frame)`, which parses it. Large frames wait for their turn; small ones pause the socket."""
    if len(frame) > SMALL_BYTES:
        return await _in_turn(lambda: work(frame), client)
    start_s = time.thread_time()
    try:
        return work(frame)
    finally:
        if pause_s := socket.pause_s(time.thread_time() - start_s):
            await anyio.sleep(pause_s)


async def _in_turn(work: Callable[[], T], account: Account) -> T:
    """Return `work()` in the account's turn; raise RequestError (429) if `MAX_WAITING` others wait."""
    if account.num_waiting >= MAX_WAITING:
        message = f"{MAX_WAITING} large requests of yours wait to be parsed, which is the most"
        raise RequestError(message, status=429, code="too_many_waiting")
    return await account.take_turn(work)


def parse(body: bytes | str, model: type[M]) -> M:
    """Return `body` as `model`. Raises RequestError, with the invalid field, if it is no such JSON object (NaN is no
    JSON) or has more than `MAX_VALUES` values."""
    check_num_values(body)
    try:
        # Unlike json.loads, this rejects lone surrogates and NaN, which no answer can hold.
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        where, what = first_error(error)
        raise RequestError(f"{where}: {what}" if where else what, param=where or None) from None


def memory_of(value: object) -> int:
    """Return the memory that parsed JSON takes: a text with its widest character, a short list with its header."""
    parts: Iterable[object] = ()
    if isinstance(value, BaseModel):
        parts = (value.__dict__, value.model_extra)
    elif isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, list):
        parts = value
    return sys.getsizeof(value) + sum(map(memory_of, parts))


def check_num_values(body: bytes | str, most: int = MAX_VALUES) -> None:
    """Raise RequestError if JSON has more than `most` values. Takes at most 5 ms per megabyte."""
    if len(body) <= most:
        return
    code = body.encode() if isinstance(body, str) else body
    if _num_marks(code) > most:  # counts marks in strings too
        code = code.replace(b"\\\\", b"").replace(b'\\"', b"")  # every remaining quote begins or ends a string
        if code.count(b'"') > 4 * most or _num_marks(b"".join(code.split(b'"')[::2])) > most:
            message = f"it holds more than {most:,} values, which is the most"
            raise RequestError(message, status=413, code="too_many_values")


def _num_marks(code: bytes) -> int:
    """Count the characters that precede values. There is at most one value more."""
    return code.count(b",") + code.count(b"[") + code.count(b"{")


def encode_json(values: Any) -> str:
    """Return `values` as JSON on one line, in ASCII, so that no reader finds a line end in it."""
    return _ENCODER.encode(values)
