"""A server's own tokenizer, through its `/tokenize` endpoint: vLLM's, SGLang's or llama.cpp's."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import anyio.from_thread
import anyio.lowlevel

from streamrag.backends.openai.http import Server
from streamrag.backends.openai.messages import token_ids as read_ids
from streamrag.core import Turn, plain_chat
from streamrag.errors import ServerError
from streamrag.support.bounded_reading import without_lone_surrogates

T = TypeVar("T")

BEGIN = "@@streamrag-begin@@"
"""Placeholder in a rendered chat for the tokens that the model needs at the beginning of every text."""
PROBE = "a"
MAX_PROBE_TOKENS = 64  # most tokens that are compared: usually there is one, and one at the beginning
MAX_BYTES_PER_CHARACTER = 64
"""Most bytes of a response per character: it has at most four tokens, one a byte, and an id at most ten digits."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The field names in the requests of one kind of server."""

    text: str
    adds_special: str
    fixed: dict[str, Any]


DIALECTS = (
    Dialect("prompt", "add_special_tokens", {}),  # vLLM, SGLang
    Dialect("content", "add_special", {"parse_special": False}),  # llama.cpp
)


async def ask_for_tokenizer(server: Server, model: str) -> "ServerTokenizer | None":
    """Return the server's tokenizer, in the first dialect that works; None if each raises a ServerError."""
    for dialect in DIALECTS:
        tokenizer = ServerTokenizer(server, model, dialect)
        try:
            await tokenizer.start()
        except ServerError:
            continue
        return tokenizer
    return None


class ServerTokenizer:
    """A tokenizer that sends every text to the server. Call its methods in threads other than the event loop's.

    Most servers find special tokens in all text, so break look-alikes in untrusted text first, see `TextTokenizer`.
    There is no chat template.
    """

    def __init__(self, server: Server, model: str, dialect: Dialect) -> None:
        parts = urlsplit(server.url)
        self._root = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", ""))
        self._server = server
        self._model = model
        self._dialect = dialect
        self._token = anyio.lowlevel.current_token()
        self._begin: list[int] = []

    async def start(self) -> None:
        """Find the tokens that the server puts before every text, by encoding a probe with and without special tokens.
        Raises ServerError if a request fails, or the probe's tokens are not among those with special ones."""
        bare = (await self._encode(PROBE))[:MAX_PROBE_TOKENS]
        whole = (await self._encode(PROBE, adds_special=True))[:MAX_PROBE_TOKENS]
        places = [place for place in range(len(whole)) if whole[place : place + len(bare)] == bare]
        if not bare or not places:
            raise ServerError(f"{self._root}/tokenize returned no tokens for {PROBE!r}")
        self._begin = whole[: places[0]]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`; with `allow_special`, `BEGIN` in front becomes the tokens that `start` found.

        No others are added. Most servers find special tokens in either case. Raises ServerError when the server fails.
        """
        if allow_special and text.startswith(BEGIN):
            return [*self._begin, *self.encode(text.removeprefix(BEGIN), allow_special=True)]
        return self._wait_for(partial(self._encode, text)) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, as the server writes it; raise ServerError when the server fails."""
        return self._wait_for(partial(self._decode, list(token_ids)))

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """Return the plain layout, after a placeholder for the tokens at the beginning."""
        return BEGIN + plain_chat(turns)

    async def _encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Return the token ids that `/tokenize` sends for `text`, whose lone surrogates are replaced."""
        dialect, text = self._dialect, without_lone_surrogates(text)
        body = {"model": self._model, dialect.text: text, dialect.adds_special: adds_special, **dialect.fixed}
        answer = await self._server.ask(
            "POST", f"{self._root}/tokenize", body, max_bytes=(1 << 16) + MAX_BYTES_PER_CHARACTER * len(text)
        )
        return read_ids(answer.get("tokens"), server=self._root)

    async def _decode(self, token_ids: list[int]) -> str:
        """Return the text that `/detokenize` sends; raise ServerError if there is none."""
        answer = await self._server.ask("POST", f"{self._root}/detokenize", {"model": self._model, "tokens": token_ids})
        for name in ("prompt", "text", "content"):  # vLLM, SGLang, llama.cpp
            if isinstance(text := answer.get(name), str):
                return text
        raise ServerError(f"{self._root}/detokenize sent no text")

    def _wait_for(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the event loop from another thread. That thread's cancel scope cancels it."""
        return anyio.from_thread.run(ask, token=self._token)
