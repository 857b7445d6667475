"""Whatever comes in as a body or a frame is refused or answered, and hurts nobody else."""

import json
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrag.core import Turn, common_prefix_len, plain_chat
from streamrag.serve import Limits
from tests.serve.responses.talking import QUESTION, talking
from tests.serve.serving import serving

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "message", "auto", "none", "file_search", "resp_1", "\ud800", "\x00"]),
)
FIELDS = [
    "background", "content", "filters", "format", "generate", "include", "input", "instructions",
    "max_output_tokens", "metadata", "previous_response_id", "prewarm", "prompt_cache_options", "reasoning", "role",
    "store", "stream", "stream_id", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "type",
    "user",
]  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
REQUESTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
TEXTS = st.one_of(
    REQUESTS.map(lambda request: json.dumps({"input": "x", **request})),
    REQUESTS.map(lambda request: json.dumps({"type": "response.create", "input": "x", **request})),
    VALUES.map(json.dumps),
    st.text(max_size=40).map(lambda text: text.encode(errors="replace").decode()),
    st.just("[" * 20_000),
)
NO_RATE = Limits(max_requests_per_minute=1_000_000)

FUZZ = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.lists(TEXTS | st.binary(max_size=40), min_size=10, max_size=10))
async def test_any_body_is_answered_or_refused(bodies: list[str | bytes]) -> None:
    async with serving(limits=NO_RATE) as served:
        for body in bodies:
            answer = await served.http.post("/v1/responses", content=body)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], body
        good = await served.http.post("/v1/responses", json={"input": QUESTION})
        assert good.status_code == 200
        assert not served.service.queries


@FUZZ
@given(st.lists(TEXTS | st.binary(max_size=40), min_size=10, max_size=10))
async def test_any_frame_is_answered_or_refused(frames: list[str | bytes]) -> None:
    async with serving(limits=NO_RATE) as served:
        async with talking(served) as talk:
            for frame in frames:
                await talk.connection.send_raw(frame)
                last = (await talk.events())[-1]
                assert last.type != "response.failed", (frame, last)
                if last.type == "error":
                    assert 400 <= last.status < 500, (frame, last)
                    assert last.error.message
            first = await talk.prepare("One.", stream_id="good")
            assert (await talk.create(QUESTION, first, stream_id="good")).status == "completed"
        good = await served.http.post("/v1/responses", json={"input": QUESTION})
        assert good.status_code == 200


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["A", "AB", "B", "C" * 40, ""]), st.sampled_from("ab"), st.booleans()),
    min_size=1,
    max_size=8,
)


@FUZZ
@given(STEPS)
async def test_any_order_of_steps_answers_the_conversation_it_went_on_from(
    steps: list[tuple[int, str, str, bool]],
) -> None:
    """A step goes on from one before, in a lane; some ask for an answer."""
    async with serving(limits=NO_RATE) as served:
        async with talking(served) as talk:
            known: list[tuple[str | None, list[Turn]]] = [(None, [])]
            for number, text, lane, completes in steps:
                before, turns = known[number % len(known)]
                turns = [*turns, Turn("user", text or "?")]
                if not completes:
                    known.append((await talk.prepare(turns[-1].text, before, stream_id=lane), turns))
                    continue
                answer = await talk.create(turns[-1].text, before, stream_id=lane, tool_choice="none")
                assert answer.status == "completed"
                whole = plain_chat(turns)
                complete = [each[-1].token_ids for each in served.backend.prompts if each and each[-1].is_complete]
                assert whole in map(served.backend.model.tokenizer.decode, complete)
                assert answer.usage.input_tokens == len(whole)
                turns.append(Turn("assistant", answer.output_text))
                known.append((answer.id, turns))
            for prompts in served.backend.prompts:
                for first, second in pairwise(prompts):
                    assert second.num_shared == common_prefix_len(first.token_ids, second.token_ids)
        assert served.source.queries == []
