"""LangChain's `ChatOpenAI` against the service: chat completions and responses."""

import pytest

from streamrag import BackendError
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import QUESTION
from tests.serve.serving import PARIS, Serving, serving

langchain_openai = pytest.importorskip("langchain_openai")


def model_of(served: Serving, *, responses: bool, **options: object) -> "langchain_openai.ChatOpenAI":
    return langchain_openai.ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        model="scripted",
        max_retries=0,
        use_responses_api=responses,
        **options,
    )


@pytest.mark.parametrize("responses", [False, True])
async def test_langchains_chat_openai_gets_whole_and_streamed_answers(responses: bool) -> None:
    async with serving() as served:
        model = model_of(served, responses=responses)
        whole = await model.ainvoke([("system", "Be brief."), ("user", QUESTION)])
        pieces = [piece async for piece in model.astream(QUESTION)]
        streamed = sum(pieces[1:], pieces[0])
    assert whole.text == streamed.text == "It is Paris [1]."
    assert whole.usage_metadata["output_tokens"] == len("It is Paris [1].")
    assert served.source.queries == [QUESTION, QUESTION]


async def test_langchains_chat_openai_sees_citations_and_chains_responses() -> None:
    async with serving() as served:
        model = model_of(served, responses=True, use_previous_response_id=True)
        first = await model.ainvoke(QUESTION)
        (text,) = [block for block in first.content if block["type"] == "text"]
        (annotation,) = text["annotations"]
        assert annotation["url"] == PARIS.uri
        await model.ainvoke([("user", QUESTION), first, ("user", "And now?")])
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
    assert prompt.count(QUESTION) == 1
    assert prompt.index(QUESTION) < prompt.index("It is Paris [1].") < prompt.index("And now?")


@pytest.mark.parametrize("responses", [False, True])
async def test_a_failure_in_mid_stream_is_raised(responses: bool) -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served:
        with pytest.raises(Exception, match="the engine failed"):
            _ = [piece async for piece in model_of(served, responses=responses).astream(QUESTION)]
