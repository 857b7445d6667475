"""Odd values in every field of every request, which are found in the models, so that a new field is tried too."""

import importlib
import json
import pkgutil
from typing import Any

import pytest
from pydantic import BaseModel, RootModel

from streamrag.serve import protocols
from streamrag.serve.connections.json_body import RequestModel
from streamrag.serve.protocols.ask import QueryRequest
from streamrag.serve.protocols.chat.requests import ToollessChatRequest
from streamrag.serve.protocols.mcp import AskResult, CitedPassage
from streamrag.serve.protocols.sessions.requests import QuestionFields
from streamrag.trace.events import ChunkFields, Fields, HintFields
from tests.serve.requests import CASES, Case, places, sender

NO_REQUESTS = {QueryRequest, QuestionFields, AskResult, CitedPassage, ToollessChatRequest}
NEEDED = {"input", "content"}
"""Fields that may be missing, but not from every request."""
ODD = (
    True,
    False,
    0,
    -1,
    10**30,
    1.5,
    1e308,
    "",
    "x",
    "\0",
    [],
    [None],
    [[]],
    [1],
    ["x"],
    [{}],
    {},
    {"x": None},
    {"type": None},
    {"type": "x"},
    {"type": []},
    {"role": "user", "content": {}},
)
TEXTS = {
    "nothing": b"",
    "spaces": b" \t ",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "no UTF-8": b'{"x": "\xff"}',
    "half a character": b'{"\\ud800": "\\udc00"}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "a text": b'"x"',
    "depth": b'{"x":' * 5_000 + b"1" + b"}" * 5_000,
    "deep lists": b"[" * 50_000,
    "digits": b'{"x":' + b"1" * 5_000 + b"}",
    "NaN": b'{"x":NaN}',
    "Infinity": b'{"x":-1e999}',
    "two values": b"{}{}",
    "a long name": b'{"' + b"x" * 10_000 + b'":1}',
    "single quotes": b"{'x':1}",
    "a form": b"question=x",
}


def of_cases(*cases: Case) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@of_cases(*CASES)
async def test_null_means_that_a_field_is_missing(case: Case) -> None:
    async with sender() as to:
        good = await to.send(case, case.body)
        assert good.status < 300 or good.code == "unsupported_value", good
        for place in places(case.model, case.body, set()):
            null = await to.send(case, place.put(case.body, None))
            missing = await to.send(case, place.put(case.body))
            assert null.kind == missing.kind, place
            if place.is_required:
                assert null.status == 400, place
                assert str(place.path[-1]) in null.message, place
            elif place.path[-1] not in NEEDED:
                assert null.kind == good.kind, place
        if issubclass(case.model, RequestModel):
            assert (await to.send(case, {**case.body, "unknown": None})).kind == good.kind


@of_cases(*CASES)
async def test_no_odd_value_of_any_field_is_an_error_of_ours(case: Case) -> None:
    async with sender() as to:
        for place in places(case.model, case.body, set()):
            for value in ODD:
                outcome = await to.send(case, place.put(case.body, value))
                assert outcome.status < 500 or outcome.code == "deadline_exceeded", (place, value, outcome)
        assert (await to.send(case, case.body)).status < 500


@of_cases(*({(case.path, case.method): case for case in CASES}).values())
async def test_no_odd_text_is_an_error_of_ours(case: Case) -> None:
    async with sender() as to:
        for name, text in TEXTS.items():
            to.served.http.headers["content-type"] = "text/plain" if text else "multipart/form-data; boundary=x"
            outcome = await to.send(case, text)
            is_blank_line = case.path == "/v1/streams" and not text.strip()  # which shows that its client lives
            assert is_blank_line or 400 <= outcome.status < 500, (name, outcome)


@pytest.mark.parametrize("first", ["null", "[]", '"x"'])
async def test_the_last_of_two_fields_with_one_name_counts(first: str) -> None:
    async with sender() as to:
        for case in CASES[:2]:
            body = json.dumps(case.body).replace('"messages":', f'"messages": {first}, "messages":')
            assert (await to.send(case, body.encode())).kind == (await to.send(case, case.body)).kind


def test_all_models_of_requests_are_tried_and_take_null() -> None:
    seen: set[type[BaseModel]] = set()
    for case in CASES:
        list(places(case.model, case.body, seen))
    found: set[type[BaseModel]] = {ChunkFields, HintFields}
    for module in pkgutil.walk_packages(protocols.__path__, f"{protocols.__name__}."):
        values = vars(importlib.import_module(module.name)).values()
        models = {each for each in values if isinstance(each, type) and issubclass(each, BaseModel)}
        found |= {each for each in models if each.__module__ == module.name and not issubclass(each, RootModel)}
    assert found - seen - NO_REQUESTS == set(), "add them to a case"
    assert [each for each in seen if not issubclass(each, RequestModel | Fields)] == []
