"""JSON that clients send, in bodies and frames, read as pydantic models.

JSON of a megabyte can hold 350,000 lists, which take 120 ms to parse, or half a million values of a wrong type, which
take more than a second to describe. No other client is served meanwhile. Therefore the number of values is bounded, too
many errors are not described, and large bodies of one client are parsed in turn, with pauses.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.failures import RequestError
from streamrag.trace.events import first_error

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

SMALL_BYTES = 16_384
"""Bytes of JSON that are parsed at once: 2 ms at most."""

MAX_VALUES = 32_768
"""Values that a body, a frame or a line may hold: 11 ms of parsing at most. An update of 4,096 chunks has 25,000."""

MAX_WAITING = 32
"""Large bodies of one client that wait to be parsed."""


class StrictModel(BaseModel):
    """A base of what clients send. It refuses unknown fields: to ignore one could change the answer."""

    model_config = ConfigDict(extra="forbid")


async def read_body(request: Request, model: type[M]) -> M:
    """Return the request's body as `model`.

    :raises RequestError: it is no JSON object, or not such a one; says where. Or too many of this client's bodies wait.
    """
    body = await request.body()
    if len(body) <= SMALL_BYTES:
        return parse(body, model)
    return await parse_in_turn(body, model, request.scope[CALLER].account)


async def checked_body(request: Request) -> bytes:
    """Return the request's body for a library that parses it, a large one in the client's turn.

    The turn is as long as if it was parsed here. Errors in the JSON are left to the library.

    :raises RequestError: it holds too many values, or too many bodies of this client wait.
    """
    body = await request.body()

    def check() -> None:
        check_num_values(body)
        with suppress(ValueError):
            from_json(body)

    if len(body) > SMALL_BYTES:
        await _in_turn(check, request.scope[CALLER].account)
    return body


async def parse_in_turn(body: bytes, model: type[M], account: Account) -> M:
    """Return `body` as `model`, parsed once earlier large bodies of the same account are and their pauses are over.

    :raises RequestError: as of `parse`; or too many bodies wait.
    """
    return await _in_turn(lambda: parse(body, model), account)


async def _in_turn(work: Callable[[], T], account: Account) -> T:
    if account.num_waiting >= MAX_WAITING:
        message = f"{MAX_WAITING} large requests of yours wait to be read, which is the most"
        raise RequestError(message, status=429, code="too_many_waiting")
    return await account.take_turn(work)


async def parse_frame(frame: str | bytes, model: type[M], client: Account, socket: Account) -> M:
    """Return a frame of a WebSocket as `model`, a large one in the client's turn, others with the socket's pauses.

    :raises RequestError: as of `parse_in_turn`.
    """
    if len(frame) > SMALL_BYTES:
        return await parse_in_turn(frame.encode() if isinstance(frame, str) else frame, model, client)
    began_s = time.thread_time()
    try:
        return parse(frame, model)
    finally:
        if pause_s := socket.pause_s(time.thread_time() - began_s):
            await anyio.sleep(pause_s)


def parse(body: bytes | str, model: type[M]) -> M:
    """Return `body` as `model`.

    :raises RequestError: it is no JSON object, or not such a one; says where.
    """
    check_num_values(body)
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
        where, what = first_error(error)
        raise RequestError(f"{where}: {what}" if where else what, param=where or None) from None


def check_num_values(body: bytes | str) -> None:
    """Check that JSON does not hold so many values that parsing it takes long. Takes 5 ms at most for a megabyte.

    :raises RequestError: it has more than `MAX_VALUES`.
    """
    if len(body) <= MAX_VALUES:
        return
    code = body.encode() if isinstance(body, str) else body
    if _num_marks(code) > MAX_VALUES:  # in texts too
        code = code.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a text
        if code.count(b'"') > 4 * MAX_VALUES or _num_marks(b"".join(code.split(b'"')[::2])) > MAX_VALUES:
            message = f"it holds more than {MAX_VALUES:,} values, which is the most"
            raise RequestError(message, status=413, code="too_many_values")


def _num_marks(code: bytes) -> int:
    """Count what stands in front of values. There is at most one value more."""
    return code.count(b",") + code.count(b"[") + code.count(b"{")
