"""vLLM's tool parsers as a library: the same calls whether an answer comes in pieces or not."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import AnswerChunk
from streamrag.errors import ConfigurationError
from streamrag.testing import CodePointTokenizer
from tests.backends.tools.tool_model import call, make_tool_llama

pytest.importorskip("vllm")

from streamrag.backends.tools.parser import AnswerReader, ToolCallParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("weather", "time")
]
ANSWERS = {
    "hermes": "I look it up.\n" + call("weather", city="Paris") + "\n" + call("time", city="São Paulo"),
    "qwen3_xml": "I look it up.\n"
    + "\n".join(
        f"<tool_call>\n<function={name}>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        for name, city in (("weather", "Paris"), ("time", "São Paulo"))
    ),
    "pythonic": '[weather(city="Paris"), time(city="São Paulo")]',
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder = make_tool_llama(tmp_path_factory.mktemp("models") / "model")
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    next_id = max(made["model"]["vocab"].values()) + 1
    for i, token in enumerate(("<tool_call>", "</tool_call>", "<|python_tag|>")):  # these parsers look for
        made["added_tokens"].append({**made["added_tokens"][0], "id": next_id + i, "content": token, "special": False})
        made["model"]["vocab"][token] = next_id + i
    path.write_text(json.dumps(made))
    return HuggingFaceTokenizer(folder)


def read(reader: AnswerReader, tokenizer: HuggingFaceTokenizer, answer: str, size: int) -> list[dict[str, Any]]:
    token_ids = tokenizer.encode(answer, allow_special=True)
    pieces = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    texts = [
        tokenizer.decode(token_ids[: i + len(piece)])
        for i, piece in zip(range(0, len(token_ids), size), pieces, strict=True)
    ]
    deltas, before = [], ""
    for piece, text in zip(pieces, texts, strict=True):
        text = text.rstrip("\ufffd")
        reason = "stop" if piece is pieces[-1] else None
        deltas.append(reader.push(AnswerChunk(text[len(before) :], tuple(piece), reason)))
        before = text
    return [delta for delta in deltas if delta]


def function(each: dict[str, Any]) -> tuple[str, Any]:
    return each["function"]["name"], json.loads(each["function"]["arguments"])


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_in_pieces(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    parser = ToolCallParser(name)
    parser.load(tokenizer)
    reader = parser.reader(TOOLS)
    deltas = read(reader, tokenizer, ANSWERS[name], 1)
    assert [function(each) for each in reader.calls] == [
        ("weather", {"city": "Paris"}),
        ("time", {"city": "São Paulo"}),
    ]
    assert len({each["id"] for each in reader.calls}) == 2
    assert "".join(delta.get("content", "") for delta in deltas) == reader.text
    assert reader.text.strip() == ("" if name == "pythonic" else "I look it up.")
    assert (reader.finish_reason("stop"), reader.finish_reason("length")) == ("tool_calls", "length")
    pieces = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert [each["index"] for each in pieces if "id" in each] == [0, 1]
    for i in range(2):
        streamed = "".join(each["function"].get("arguments", "") for each in pieces if each["index"] == i)
        assert streamed == reader.calls[i]["function"]["arguments"]


def test_a_single_call_reader_returns_at_most_one_call(tokenizer: HuggingFaceTokenizer) -> None:
    parser = ToolCallParser("hermes")
    parser.load(tokenizer)
    reader = parser.reader(TOOLS, is_single=True)
    read(reader, tokenizer, ANSWERS["hermes"], 1)
    assert [function(each) for each in reader.calls] == [("weather", {"city": "Paris"})]


def test_an_answer_without_calls_is_its_text(tokenizer: HuggingFaceTokenizer) -> None:
    parser = ToolCallParser("hermes")
    parser.load(tokenizer)
    for size in (1, 7, 1000):
        reader = parser.reader(TOOLS)
        read(reader, tokenizer, "It is < 5 °C, as <tool> says [1].", size)
        assert (reader.text, reader.calls) == ("It is < 5 °C, as <tool> says [1].", [])
        assert reader.finish_reason("stop") == "stop"


def test_sampling_has_a_grammar_only_if_a_call_is_forced(tokenizer: HuggingFaceTokenizer) -> None:
    parser = ToolCallParser("hermes")
    parser.load(tokenizer)
    assert parser.sampling() == parser.sampling(TOOLS) == {"skip_special_tokens": False}
    named = {"type": "function", "function": {"name": "time"}}
    for choice in ("required", named):
        constraint = parser.sampling(TOOLS, choice)["structured_outputs"]
        assert "time" in json.dumps(constraint)
        assert ("weather" in json.dumps(constraint)) == (choice == "required")
    with pytest.raises(ConfigurationError, match="vLLM refuses the tools"):
        parser.sampling(TOOLS, {"type": "function", "function": {"name": "other"}})


def test_a_parser_that_does_not_exist_or_is_for_other_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tool parser 'hermse'. It has .*hermes"):
        ToolCallParser("hermse")
    with pytest.raises(ConfigurationError, match="no chat template for tools"):
        ToolCallParser("hermes").load(CodePointTokenizer())
    with pytest.raises(ConfigurationError, match=r"llama3_json is not for this model: .*python_tag"):
        ToolCallParser("llama3_json").load(HuggingFaceTokenizer(make_tool_llama(tmp_path / "model")))
