"""A service in front of several replicas: what belongs together goes to one of them, where its KV is."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from in_process import InProcess, replica_streams

from streamrag.core import BackendEvent, Prompt, SamplingParams
from streamrag.routing import make_router
from streamrag.testing import ScriptedBackend
from tests.serve.serving import Serving, serving

NAMES = ("a", "b", "c", "d")


class Replicated:
    """Scripted engines behind a router, as one backend."""

    def __init__(self, router: str) -> None:
        self.engines = {name: ScriptedBackend(answer="Yes.") for name in NAMES}
        self.model = self.engines["a"].model
        replicas = InProcess(self.engines, max_open=64)  # room for all: ids are random, and may all hash to one replica
        self._streams = replica_streams(replicas, make_router(router))

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async with aclosing(self._streams.generate(prompts, params)) as events:
            async for event in events:
                yield event

    def asked(self, text: str) -> set[str]:
        """Replicas that have had a prompt with this text."""
        decode = self.model.tokenizer.decode
        return {
            name
            for name, engine in self.engines.items()
            if any(text in decode(prompt.token_ids) for query in engine.prompts for prompt in query)
        }


async def chat(served: Serving, who: str) -> None:
    messages = [{"role": "system", "content": "Be brief. " * 50}, {"role": "user", "content": f"I am {who}."}]
    for said in ("And then?", "And why?", ""):
        answer = await served.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": said}]


async def respond(served: Serving, who: str) -> None:
    previous = None
    for said in (f"I am {who}.", "And then?", "And why?"):
        asked = {"input": said, "previous_response_id": previous, "instructions": "Be brief. " * 50}
        answer = await served.http.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]


async def session(served: Serving, who: str) -> None:
    opened = await served.http.post("/v1/sessions", json={"system": "Be brief. " * 50})
    url = f"/v1/sessions/{opened.json()['id']}"
    for said in ("And then?", "And why?"):
        version = (await served.http.post(f"{url}/data", json={"data": [f"I am {who}." + 200 * "."]})).json()["version"]
        answer = await served.http.post(f"{url}/ask", json={"question": said, "at_least": version})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("talk", [chat, respond, session])
async def test_all_of_a_conversation_is_asked_of_one_replica_and_others_elsewhere(talk) -> None:  # type: ignore[no-untyped-def]
    """By consistent hashing, which would send all of these to one: they begin alike."""
    async with serving(backend=(backend := Replicated("consistent_hash"))) as served:
        for who in range(12):
            await talk(served, f"guest {who}")
        where = [backend.asked(f"I am guest {who}.") for who in range(12)]
    assert [len(each) for each in where] == [1] * 12
    assert len(set.union(*where)) > 1


async def test_a_question_about_a_session_goes_to_where_its_data_are_computed() -> None:
    """Ours hears of that, though the session's own prompt is never complete."""
    async with serving(backend=(backend := Replicated("soonest"))) as served:
        for who in range(8):
            await session(served, f"guest {who}")
        assert [len(backend.asked(f"I am guest {who}.")) for who in range(8)] == [1] * 8
        assert len(set.union(*(backend.asked(f"I am guest {who}.") for who in range(8)))) > 1
