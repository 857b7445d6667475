"""A backend for a model behind an OpenAI-compatible server, using its completions endpoint."""

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

from streamrag.backends.openai.http import MAX_ANSWER_BYTES, RequestRejectedError, Server, StrayTextError
from streamrag.backends.openai.messages import answer_chunk, clean, length, objects, token_usage
from streamrag.backends.openai.server_tokenizer import ServerTokenizer, ask_for_tokenizer
from streamrag.backends.special_token_guard import TextTokenizer
from streamrag.backends.tokenizer import CodePointTokenizer, HuggingFaceTokenizer
from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Progress, Prompt, SamplingParams, Tokenizer, TokenUsage
from streamrag.core.lifecycle import started_once
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError, ServerError
from streamrag.support.validation import Count, CountOrZero, Seconds, SecondsOrZero, validated

PROBE = "The server says which tokens it was sent."
MAX_MODEL_NAME_CHARS = 500
RESERVED = {"model", "prompt", "stream"}
NO_TEMPLATE = ", without the model's chat template (give its tokenizer for that)"
SPACED = "; text that looks like a special token, such as <|end|>, gets a space"

MAX_PROMPT_TOKEN_BYTES = 64  # most bytes of an answer for each token of the prompt, which servers may repeat
MAX_TOKEN_BYTES = 1 << 12
"""Most bytes of an answer for each of its tokens: usually a few hundred, more with log-probabilities."""
MAX_STREAM_BYTES = 64 << 20  # most bytes of any streamed answer: 200,000 tokens of a common server
MAX_EVENT_BYTES = 1 << 16
"""Most bytes of one event, besides the prompt's token ids and a share of the answer, which may arrive in few events."""
MAX_EVENT_TOKEN_BYTES = 32
MAX_TOKEN_EVENTS = 2
MAX_SPARE_EVENTS = 1000  # most events without a token: keep-alives, or usage statistics


class OpenAIBackend:
    """Uses any server with `/v1/models` and `/v1/completions`; best vLLM's, which takes token ids and caches prefixes.

    Prompts are sent as token ids if the server accepts them, which `start` tests. Otherwise they are sent as text, and
    `model.is_exact` is False: the server tokenizes the text itself, so a streamed prompt and the same prompt in one
    piece may differ. Without any tokenizer, lengths count characters.

    Untrusted text never becomes a special token. It is unchanged in token ids of the model's own tokenizer; where the
    server tokenizes, a space breaks look-alikes first (`model.breaks_look_alikes`).

    Answers have token ids only if the server sends them. Their `usage` is the server's, which each request asks for;
    where it reports none, tokens are counted with the tokenizer, and unknown without one. The size of a response is
    limited by `max_tokens` and the length of the prompt. Proxies and other settings in the environment are not used.

    base_url: where `/completions` is found, as in "http://127.0.0.1:8000/v1"; without a path, `/v1` is added.
    model: the model's name at the server. By default the only one that the server has.
    tokenizer: the model's own, or a path or hub name to load it from. By default the server tokenizes every text, if
        it has `/tokenize`.
    api_key: sent with every request.
    max_model_len: most tokens of prompt and answer together. By default the server's, from its list of models.
    timeout_s: the longest silence of the server, before or within an answer.
    max_retries: retries of a connection that fails before the server's first byte. Nothing else is retried.
    retry_delay_s: seconds before the first retry; each further delay is longer.
    block_size: the server's KV block size in tokens. Smaller additions are not worth a warming request.

    :raises ConfigurationError: an option has an invalid value.
    """

    @validated
    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        max_model_len: Count | None = None,
        timeout_s: Seconds = 60.0,
        max_retries: CountOrZero = 2,
        retry_delay_s: SecondsOrZero = 0.25,
        block_size: Count = 16,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"base_url={base_url!r} is not an http or https address like http://host:8000/v1")
        address = parts._replace(path=parts.path.rstrip("/") or "/v1", fragment="").geturl()
        self._url = address.partition("?")[0]
        self._wanted_model = model
        self._model_name = model or ""
        self._given_tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._make_server = partial(
            Server,
            address,
            api_key=api_key,
            timeout_s=timeout_s,
            max_retries=max_retries,
            retry_delay_s=retry_delay_s,
        )
        self._block_size = block_size
        self._server: Server | None = None
        self._info: ModelInfo | None = None
        self._takes_ids = False
        self._optional: dict[str, Any] = {}
        """Parameters beyond OpenAI's that the server is known to support."""
        self._asks_for_usage = True
        """Whether answers are requested with their usage, as long as the server does not refuse that."""

    @property
    def model(self) -> ModelInfo:
        """The server's model and tokenizer; raises BackendError before the start."""
        if self._info is None:
            raise BackendError("the backend has not been started: await backend.start(print) first")
        return self._info

    @started_once
    async def start(self, progress: Progress) -> None:
        """Connect to the server, find the wanted or only model, and set `model`, the facts about it. Take the given
        tokenizer, else the server's, and test whether the server accepts token ids; without a tokenizer, count
        characters. If the start fails or is cancelled, the connections are closed again.

        :raises ServerError: when the server cannot be reached or refuses.
        :raises ConfigurationError: when the wanted model, or exactly one, is not served, or its length is unknown.
        """
        progress(f"connecting to {self._url}")
        try:
            self._server = await anyio.to_thread.run_sync(self._make_server)
            wanted = self._wanted_model, self._max_model_len
            self._model_name, max_model_len = await _find_model(self._server, *wanted, progress)
            tokenizer = await self._make_tokenizer(self._server)
        except BaseException:
            await self.aclose()
            raise
        text_tokenizer = tokenizer if isinstance(tokenizer, TextTokenizer) else None
        self._info = ModelInfo(
            self._model_name,
            tokenizer,
            max_model_len,
            is_exact=self._takes_ids,
            breaks_look_alikes=text_tokenizer is not None,
            has_logprobs=False,
            unit=text_tokenizer.unit if text_tokenizer else "tokens",
            min_head_len=self._block_size,
        )
        kind = "token ids" if self._takes_ids else "text"
        notes = ("" if self._given_tokenizer else NO_TEMPLATE) + (SPACED if text_tokenizer else "")
        progress(f"{self._model_name} is served, prompts are sent as {kind}{notes}")

    async def _make_tokenizer(self, server: Server) -> Tokenizer:
        """Return the given tokenizer, else the server's if the server takes ids, else one of characters.

        The tokenizer is in a `TextTokenizer`, which breaks look-alikes, unless it was given and the server takes ids.
        A request sets `_takes_ids` and `_optional`; none is sent if there is no tokenizer but that of characters.
        """
        self._takes_ids, self._optional, self._asks_for_usage = False, {}, True
        given: Tokenizer | None
        if isinstance(self._given_tokenizer, str | os.PathLike):
            given = await anyio.to_thread.run_sync(HuggingFaceTokenizer, self._given_tokenizer)
        else:
            given = self._given_tokenizer or await ask_for_tokenizer(server, self._model_name)
        if given is None or isinstance(given, CodePointTokenizer):
            return TextTokenizer(CodePointTokenizer())
        await self._test_token_ids(await anyio.to_thread.run_sync(given.encode, PROBE))
        if not isinstance(given, ServerTokenizer):
            return given if self._takes_ids else TextTokenizer(given)
        # A server that tokenizes but accepts only text is sent text, whose length is counted in characters.
        return TextTokenizer(given if self._takes_ids else CodePointTokenizer())

    async def _test_token_ids(self, ids: list[int]) -> None:
        """Send `ids` as a prompt, and ask for their echo; if the server refuses, send them without asking.

        Unless that is refused too, `_takes_ids` is whether the echo, or without one the number of prompt tokens, is
        right. If there is an echo, `_optional` keeps the parameter that asks for one.
        """
        for optional in ({"return_token_ids": True}, {}):
            try:
                answer = await self._complete({"prompt": ids, **optional})
            except RequestRejectedError:
                continue
            choice = next(objects(answer.get("choices")), {})
            usage = next(objects([answer.get("usage")]), {})
            echoed = choice.get("prompt_token_ids")
            self._takes_ids = usage.get("prompt_tokens") == len(ids) if echoed is None else echoed == ids
            self._optional = {} if echoed is None else optional
            return

    async def aclose(self) -> None:
        """Close the connections to the server. Does nothing if the backend is not started."""
        server, self._server, self.is_started = self._server, None, False
        if server is not None:
            await server.aclose()

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, and yield `Prefilled`; then yield the answer to the complete one.

        :raises PromptTooLongError: when a prompt leaves no room for an answer.
        :raises ConfigurationError: when `params.extra` has a name of another parameter, or is not JSON.
        :raises ServerError: when the server cannot be reached, refuses, goes silent or ends an answer early.
        """
        body = _body(params)

        async def prefill(token_ids: tuple[int, ...]) -> None:
            await self._complete({"prompt": await self._prompt(token_ids)})

        async def answer(token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
            body["prompt"] = await self._prompt(token_ids)
            async with aclosing(self._stream(body, len(token_ids), params)) as chunks:
                async for chunk in chunks:
                    yield chunk

        return warm_then_generate(prompts, prefill=prefill, generate=answer, block_size=self._block_size)

    async def _prompt(self, token_ids: tuple[int, ...]) -> list[int] | str:
        """Return the ids or, if the server takes none, the text without `bos_text`; PromptTooLongError if too long."""
        model = self.model
        if len(token_ids) >= model.max_model_len:
            raise PromptTooLongError(
                f"a prompt of {len(token_ids)} {model.unit} leaves no room for an answer: "
                f"max_model_len is {model.max_model_len}"
            )
        if self._takes_ids:
            return list(token_ids)
        text = await in_thread(model.tokenizer, partial(model.tokenizer.decode, token_ids))
        # The server adds the beginning-of-text token itself.
        return text.removeprefix(getattr(model.tokenizer, "bos_text", ""))

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._model_name, "max_tokens": 1, "temperature": 0.0, **body}
        return await self._started_server().ask("POST", "/completions", body)

    async def _stream(
        self, body: dict[str, Any], num_prompt_tokens: int, params: SamplingParams
    ) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the chunks of the answers; each answer's final one follows after all events, the last with `usage`.

        Raises ServerError if an answer has no final chunk, with what the server sent in its place.
        """
        ends: dict[int, AnswerChunk] = {}
        reported: Any = None
        texts, num_ids = [""] * params.n, 0
        num_tokens = params.n * min(params.max_tokens, self.model.max_model_len)
        try:
            async with aclosing(self._events(body, num_prompt_tokens, num_tokens)) as events:
                async for event in events:
                    reported = event.get("usage") or reported
                    for choice in islice(objects(event.get("choices")), params.n):
                        chunk = answer_chunk(choice, server=self._url, n=params.n)
                        texts[chunk.index] += chunk.text
                        num_ids += len(chunk.token_ids)
                        if held := ends.pop(chunk.index, None):  # was not the last, although it had a finish_reason
                            yield replace(held, finish_reason=None)
                            chunk = replace(chunk, finish_reason=chunk.finish_reason or held.finish_reason)
                        if chunk.finish_reason is not None:
                            ends[chunk.index] = chunk
                        else:
                            yield chunk
        except StrayTextError:
            if len(ends) < params.n:
                raise
        if len(ends) < params.n:
            raise ServerError(f"{self._url} ended the stream in the middle of an answer")
        *others, last = ends.values()
        for chunk in others:
            yield chunk
        yield replace(last, usage=await self._usage(token_usage(reported), num_prompt_tokens, texts, num_ids))

    async def _events(
        self, body: dict[str, Any], num_prompt_tokens: int, num_tokens: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of answers, whose limits grow with the numbers of tokens.

        If the server refuses the request for usage, the request is repeated without, and later ones do not ask.
        """
        num_prompt_bytes = num_prompt_tokens * MAX_PROMPT_TOKEN_BYTES
        stream = partial(
            self._started_server().stream,
            "/completions",
            max_bytes=min(MAX_ANSWER_BYTES + num_prompt_bytes + num_tokens * MAX_TOKEN_BYTES, MAX_STREAM_BYTES),
            max_events=MAX_SPARE_EVENTS + num_tokens * MAX_TOKEN_EVENTS,
            max_event_bytes=min(
                MAX_EVENT_BYTES + num_prompt_bytes + num_tokens * MAX_EVENT_TOKEN_BYTES, MAX_ANSWER_BYTES
            ),
        )
        body = {"model": self._model_name, "stream": True, **self._optional, **body}
        for usage in ({"stream_options": {"include_usage": True}}, {}) if self._asks_for_usage else ({},):
            try:
                async with aclosing(stream({**usage, **body})) as events:
                    async for event in events:
                        self._asks_for_usage = bool(usage)
                        yield event
                return
            except RequestRejectedError:
                if not usage:
                    raise

    async def _usage(self, reported: TokenUsage, num_prompt: int, texts: list[str], num_ids: int) -> TokenUsage | None:
        """Return the reported usage, its gaps filled by counting ids or tokenizing `texts`; None if ids give the same.

        The output's length stays None if the tokenizer only counts characters, or its server fails.
        """
        model = self.model
        counted = model.usage(num_prompt, num_ids, "".join(texts), None)
        num_output = counted.num_output_tokens if reported.num_output_tokens is None else reported.num_output_tokens
        if num_output is None and model.unit == "tokens":
            with suppress(ServerError):  # of a tokenizer behind a server
                encode = model.tokenizer.encode
                num_output = await in_thread(model.tokenizer, lambda: sum(len(encode(text)) for text in texts))
        num_prompt_tokens = reported.num_prompt_tokens
        usage = TokenUsage(counted.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens, num_output)
        return None if usage == counted else usage

    def _started_server(self) -> Server:
        if self._server is None:
            raise BackendError("the backend is not running: it was closed, or not started")
        return self._server


async def _find_model(server: Server, name: str | None, num_tokens: int | None, progress: Progress) -> tuple[str, int]:
    """Return the name and length of the wanted model, or else of the only one served.

    The length is `num_tokens` if given, else the server's. If both are given, only a server that cannot be reached is
    an error. Otherwise raises ConfigurationError if the wanted model is not served, or there is not exactly one, or no
    length; ServerError without a list, for an invalid length or a name that is too long.
    """
    is_given = name is not None and num_tokens is not None
    try:
        answer = await server.ask("GET", "/models")
    except ServerError as error:
        if not is_given or error.__cause__:  # the error of a connection
            raise
        answer = {}
    models = {entry["id"]: entry for entry in objects(answer.get("data")) if isinstance(entry.get("id"), str)}
    served = clean(", ".join(models))
    if name is None:
        if len(models) != 1:
            raise ConfigurationError(f"{server.url} serves {served or 'no model'}: name the model")
        (name,) = models
        if len(name) > MAX_MODEL_NAME_CHARS:  # the name is sent with every request, and displayed
            raise ServerError(
                f"{server.url} serves a model whose name has {len(name):,} characters, and "
                f"{MAX_MODEL_NAME_CHARS:,} is the most: {clean(name)}"
            )
    if name not in models:
        problem = f"{server.url} does not serve {name!r}. It serves: {served or 'nothing'}"
        if not is_given:
            raise ConfigurationError(f"{problem}. To use it all the same, give max_model_len (--max-model-len)")
        progress(f"{problem}. It is used all the same, because max_model_len is given")
    if num_tokens is not None:
        return name, num_tokens
    if (max_model_len := models[name].get("max_model_len")) is not None:
        return name, length(max_model_len, server=server.url, name="max_model_len")
    raise ConfigurationError(f"{server.url} reports no length of the model: give max_model_len (--max-model-len)")


def _body(params: SamplingParams) -> dict[str, Any]:
    """Return the request's parameters, most only if set, and `extra`.

    Raises ConfigurationError if `extra` has the name of one of these parameters, set or not, or of `RESERVED`.
    """
    body: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    optional = {
        "seed": params.seed,
        "stop": list(params.stop) or None,
        "top_k": params.top_k or None,
        "ignore_eos": params.ignore_eos or None,
        "n": params.n if params.n > 1 else None,
        "response_format": params.json_schema and _response_format(params.json_schema),
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    if reserved := params.extra.keys() & (body.keys() | optional.keys() | RESERVED):
        raise ConfigurationError(f"SamplingParams.extra: {', '.join(sorted(reserved))} cannot be given there")
    return body | dict(params.extra)


def _response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's parameter for a JSON schema, whose `title` must be usable as a name."""
    name = re.sub(r"[^\w-]", "_", str(schema.get("title") or "answer"), flags=re.ASCII)[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": dict(schema), "strict": True}}
