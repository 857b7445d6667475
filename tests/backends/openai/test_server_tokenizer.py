"""Against servers that do what each test says. `test_openai_special_tokens.py` has whole queries, `test_openai_vllm.py`
the real one."""

from collections.abc import AsyncIterator

import anyio.to_thread
import pytest
from openai_server import Request, Server, reply

from streamrag.backends.openai.http import Server as Client
from streamrag.backends.openai.server_tokenizer import ServerTokenizer, ask_for_tokenizer
from streamrag.core import Turn
from streamrag.errors import ServerError


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    client = Client(f"{server.url}/v1", api_key=None, timeout_s=5.0, max_retries=0, retry_delay_s=0.0)
    yield client
    await client.aclose()
    await server.until_no_connection()


async def code_points(request: Request) -> None:
    """Like vLLM, with 1 at the beginning and 2 at the end of every text."""
    assert request.body["model"] == "tiny"
    ids = [ord(character) for character in request.body["prompt"]]
    await request.send_json({"tokens": [1, *ids, 2] if request.body["add_special_tokens"] else ids, "count": 0})


@pytest.fixture
async def tokenizer(server: Server, client: Client) -> ServerTokenizer:
    server.tokenize = code_points
    tokenizer = await ask_for_tokenizer(client, "tiny")
    assert tokenizer is not None
    return tokenizer


async def test_texts_are_encoded_by_the_server(tokenizer: ServerTokenizer) -> None:
    assert await anyio.to_thread.run_sync(tokenizer.encode, "a漢") == [97, 28450]
    assert await anyio.to_thread.run_sync(tokenizer.encode, "") == []
    assert await anyio.to_thread.run_sync(tokenizer.encode, "a\ud83d") == [97, 0xFFFD]


async def test_a_chat_begins_with_what_the_model_wants_at_the_beginning(tokenizer: ServerTokenizer) -> None:
    chat = tokenizer.render_chat([Turn("user", "a")])
    ids = await anyio.to_thread.run_sync(lambda: tokenizer.encode(chat, allow_special=True))
    assert ids == [1, *map(ord, "User: a\n\nAssistant:")]
    theirs = await anyio.to_thread.run_sync(tokenizer.encode, chat)
    assert 1 not in theirs, "text of others that looks like the mark of the beginning"


async def test_ids_are_decoded_by_the_server(server: Server, tokenizer: ServerTokenizer) -> None:
    for name in ("prompt", "text", "content"):
        server.handlers = [reply({name: "a漢"})]
        assert await anyio.to_thread.run_sync(tokenizer.decode, (97, 28450)) == "a漢"
        assert server.requests[-1].path == "/detokenize"
        assert server.requests[-1].body["tokens"] == [97, 28450]
    server.handlers = [reply({"prompt": 5})]
    with pytest.raises(ServerError, match="detokenize sent no text"):
        await anyio.to_thread.run_sync(tokenizer.decode, (97,))


@pytest.mark.parametrize(
    "answer",
    [{}, {"tokens": []}, {"tokens": None}, {"tokens": "97"}, {"tokens": [True]}, {"tokens": [-1]}, {"tokens": 5}, []],
)
async def test_a_server_that_makes_no_tokens_has_no_tokenizer(server: Server, client: Client, answer: object) -> None:
    server.tokenize = reply(answer)
    assert await ask_for_tokenizer(client, "tiny") is None


async def test_more_tokens_than_a_text_can_have_are_an_error(server: Server, tokenizer: ServerTokenizer) -> None:
    server.tokenize = reply({"tokens": [1234] * 50_000})
    with pytest.raises(ServerError, match="more than the limit of"):
        await anyio.to_thread.run_sync(tokenizer.encode, "a")


async def test_a_server_that_fails_later_is_an_error(server: Server, tokenizer: ServerTokenizer) -> None:
    server.tokenize = reply({"error": {"message": "out of memory"}}, 500)
    with pytest.raises(ServerError, match="status 500: out of memory"):
        await anyio.to_thread.run_sync(tokenizer.encode, "a")
