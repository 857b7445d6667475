"""The schema of events that trace files and HTTP share."""

import json
from typing import Any

import pytest

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update
from streamrag.trace.events import EventLine, HintFields, LineCodec, LineError, encode_event

STRICT = LineCodec[EventLine](EventLine, "type")
LENIENT = LineCodec[EventLine](EventLine, "type", ignores_unknown=True)

CHUNK = Chunk("text", "uri", "title", 3, 0.5)
EVENTS: list[SourceEvent] = [
    Append(CHUNK, Hint(2, 1.5)),
    Update((CHUNK, CHUNK)),
    Skipped("uri", "reason"),
    CutShort("reason"),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_is_encoded_is_decoded_as_it_was(event: SourceEvent) -> None:
    kind, fields = encode_event(event)
    assert STRICT.decode(json.dumps({"type": kind, **fields}).encode()).event() == event


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"x": 1}, "x"),
        ({"chunk": {"text": "", "uri": "", "x": 1}}, "chunk.x"),
        ({"hint": {"x": 1}}, "hint.x"),
    ],
)
def test_only_a_file_may_have_unknown_fields(fields: dict[str, Any], where: str) -> None:
    values = {"type": "append", "chunk": {"text": "", "uri": ""}, **fields}
    assert LENIENT.decode_values(values).event() in (Append(Chunk("", "")), Append(Chunk("", ""), Hint()))
    with pytest.raises(LineError, match="Extra inputs are not permitted") as raised:
        STRICT.decode_values(values)
    assert raised.value.where == where


def test_an_error_does_not_repeat_a_long_value() -> None:
    with pytest.raises(LineError) as raised:
        STRICT.decode_values({"type": "x" * 10_000})
    assert len(str(raised.value)) < 500


def test_a_hint_without_sense_is_not_encoded() -> None:
    assert HintFields.of(Hint(-1, float("nan"))) == HintFields()
    assert HintFields.of(Hint(1 << 31, -2.0)) == HintFields(end_s=-2.0)
    assert HintFields.of(None) is None
