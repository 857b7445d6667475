"""Compute the answer to one question of a session: free text, or a choice from given answers.

A choice computes only as many tokens as tell the answers apart:

    prompt | no
           | very ─ high        One pass gives the log-probabilities of "no" and "very". If "no" leads, it wins.
                 └─ low         If "very" leads, a second pass behind it compares "high" and "low".

Source: the ready-position exit of arXiv 2605.13784, section 3.9.4. The paper looks at the end of the data, before any
question, and gives every question the same answer. Here the pass is at the end of the prompt, behind the question.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any, TypeAlias

from streamrag.core import AnswerChunk, Backend, Prompt, RequestClass, SamplingParams, Tokenizer, only
from streamrag.core.retrieval import closing
from streamrag.core.tokenizer_threads import in_thread
from streamrag.errors import BackendError, ConfigurationError
from streamrag.query.answer_chunks import AnswerChunks
from streamrag.query.answer_stream import Emit
from streamrag.records import RequestRecord
from streamrag.sessions.ingestion import Snapshot
from streamrag.sessions.question_options import DECISIVE_MARGIN, Question
from streamrag.telemetry import Answer

TokenIds: TypeAlias = tuple[int, ...]
ForwardPass: TypeAlias = Callable[[TokenIds, Sequence[int]], Awaitable[tuple[int | None, Any]]]
"""Runs one pass of the engine: given the tokens behind the prompt and the allowed next tokens, returns the next token
and the log-probabilities of all allowed ones; None if the engine has none."""

MAX_URGENT_TOKENS = 2_048
"""Tokens behind the data up to which a question has the urgency of the class `session`, because it takes the engine a
step. A longer one is ordered among all other prompts, so that nobody overtakes others with a question of any length."""


@dataclass(frozen=True, slots=True)
class ChosenAnswer:
    """The most likely of the given answers, and how sure that is."""

    text: str
    token_ids: TokenIds
    """Leading tokens of the answer that had to be computed."""
    gap: float | None
    """Lead over the next best answer, in log-probability; None if unknown, or if there is no other answer."""


async def compute_answer(
    backend: Backend,
    snapshot: Snapshot,
    question: Question,
    submitted_s: float,
    clock: Callable[[], float],
    emit: Emit,
) -> Answer:
    """Compute the answer to `question` from `snapshot`, emit its pieces as TokensGenerated, and return the whole.

    A choice is a single piece, and has a `gap` only if `question.with_margin`. A free answer has that of its first
    token if the engine returns log-probabilities.

    :raises PromptTooLongError, BackendError: the answer cannot be computed.
    :raises ConfigurationError: the given answers cannot be told apart.
    """
    waited_s = clock() - submitted_s
    tokenizer, answers = snapshot.prompts.tokenizer, question.answers
    choices = await in_thread(tokenizer, partial(encode_answers, tokenizer, answers)) if answers else {}
    token_ids = await in_thread(tokenizer, partial(snapshot.prompts.complete, snapshot.token_ids, question.text))
    is_urgent = len(token_ids) - len(snapshot.token_ids) <= MAX_URGENT_TOKENS
    request_class: RequestClass = "session" if is_urgent else "pool"
    conversation_id = snapshot.prompts.conversation_id
    prompt = Prompt(token_ids, is_complete=True, request_class=request_class, conversation_id=conversation_id)
    chunks = AnswerChunks(backend.model, lambda: clock() - submitted_s)
    if choices:
        choice, record = await _choose(backend, prompt, question, choices)
        await emit(chunks.add(AnswerChunk(choice.text, choice.token_ids, "stop", record)))
        gap = choice.gap if question.with_margin else None
    else:
        gap = await _generate_text(backend, replace(prompt, draft=question.draft), question.params_for(), chunks, emit)
    return chunks.join(
        num_prompt_tokens=len(token_ids),
        retrieval_s=waited_s,
        submitted_s=submitted_s,
        version=snapshot.version,
        gap=gap,
    )


async def _choose(
    backend: Backend, prompt: Prompt, question: Question, choices: Mapping[TokenIds, str]
) -> tuple[ChosenAnswer, RequestRecord | None]:
    """Return the most likely answer, and the record of the last pass."""
    last: list[AnswerChunk] = []
    one_pass = _passes(backend, prompt, question, choices, last)
    choice = await choose_answer(choices, one_pass, question.decisive_margin)
    return choice, last[-1].record if last else None


async def _generate_text(
    backend: Backend, prompt: Prompt, params: SamplingParams, chunks: AnswerChunks, emit: Emit
) -> float | None:
    """Add the chunks of a free answer to `chunks` and emit them; return the gap of the first token, if known."""
    gap, has_token = None, False
    async with aclosing(_generate(backend, prompt, params)) as pieces:
        async for chunk in pieces:
            if chunk.token_ids and not has_token:
                has_token, gap = True, _gap(chunk.logprobs)
            await emit(chunks.add(chunk))
    return gap


def encode_answers(tokenizer: Tokenizer, answers: Sequence[str]) -> dict[TokenIds, str]:
    """Return a mapping from each answer's tokens to its text, in the given order. Blocking.

    :raises ConfigurationError: an answer has no tokens, or the same tokens as another or as the beginning of another.
    """
    by_tokens: dict[TokenIds, str] = {}
    for text in answers:
        token_ids = tuple(tokenizer.encode(text))
        if not token_ids:
            raise ConfigurationError(f"the answer {text!r} has no tokens: choose another")
        for other_ids, other in by_tokens.items():
            num_shared = min(len(token_ids), len(other_ids))
            if token_ids[:num_shared] == other_ids[:num_shared]:
                raise ConfigurationError(
                    f"the answers {other!r} and {text!r} begin with the same tokens, and one of them ends there: "
                    "choose others"
                )
        by_tokens[token_ids] = text
    return by_tokens


async def choose_answer(
    answers: Mapping[TokenIds, str], one_pass: ForwardPass, decisive_margin: float = DECISIVE_MARGIN
) -> ChosenAnswer:
    """Return the most likely of `answers`, which are as `encode_answers` returns them, with its lead.

    The best prefix is extended until it is an answer, or until it has one answer only and leads by `decisive_margin`.
    A token that all answers share takes no pass. If a pass lacks a log-probability, only its sampled token is followed.
    The lead is None if there is no other prefix.

    :raises BackendError: the engine sampled a token that is not allowed, or none.
    """
    prefixes: dict[TokenIds, float] = {(): 0.0}  # with their log-probabilities
    while True:
        best = max(prefixes, key=prefixes.__getitem__)
        candidates = [token_ids for token_ids in answers if token_ids[: len(best)] == best]
        others = [value for token_ids, value in prefixes.items() if token_ids != best]
        lead = prefixes[best] - max(others, default=-inf)
        if best in answers or (best and len(candidates) == 1 and lead >= decisive_margin):
            return ChosenAnswer(answers[candidates[0]], best, lead if isfinite(lead) else None)
        allowed = list(dict.fromkeys(token_ids[len(best)] for token_ids in candidates))
        if len(allowed) == 1 and not others:  # a token that all answers share decides nothing
            prefixes = {(*best, allowed[0]): 0.0}
            continue
        token_id, logprobs = await one_pass(best, allowed)
        if token_id not in allowed:
            raise BackendError("the engine sampled none of the answers")
        values = {each: logprobs[each].logprob for each in allowed if each in logprobs} if logprobs else {}
        if len(values) < len(allowed):
            prefixes = {(*best, token_id): 0.0}
            continue
        value = prefixes.pop(best)
        for each in sorted(allowed, key=lambda each: each != token_id):  # the sampled token wins a tie
            prefixes[*best, each] = value + values[each]


def _passes(
    backend: Backend,
    prompt: Prompt,
    question: Question,
    choices: Mapping[TokenIds, str],
    chunks: list[AnswerChunk],
) -> ForwardPass:
    """Return a function that runs one pass of the engine and stores its chunks in `chunks`, in place of the last ones.
    Log-probabilities are requested only if the margin is wanted, or if an answer has several tokens."""
    with_logprobs = question.with_margin or any(len(each) > 1 for each in choices)

    async def one_pass(prefix: TokenIds, allowed: Sequence[int]) -> tuple[int | None, Any]:
        params = question.params_for(allowed, with_logprobs=with_logprobs)
        longer = replace(prompt, token_ids=prompt.token_ids + prefix)
        async with aclosing(_generate(backend, longer, params)) as pieces:
            chunks[:] = [chunk async for chunk in pieces]
        first = next((chunk for chunk in chunks if chunk.token_ids), None)
        return (first.token_ids[0], first.logprobs and first.logprobs[0]) if first else (None, None)

    return one_pass


async def _generate(backend: Backend, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
    """Send a complete prompt; yield its answer chunks. Raise BackendError if none comes or the last is unfinished."""
    is_finished = False
    async with (
        aclosing(only(prompt)) as prompts,
        closing(backend.generate(prompts, params)) as events,
    ):
        async for event in events:
            if isinstance(event, AnswerChunk):
                is_finished = event.finish_reason is not None
                yield event
    if not is_finished:
        raise BackendError("the engine ended without finishing its answer")


def _gap(logprobs: Any) -> float | None:
    """Return the difference in log-probability of the two likeliest first tokens; None if there are no two, or if it
    is not finite."""
    if not logprobs:
        return None
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    gap = float(best[0] - best[1]) if len(best) > 1 else inf
    return gap if isfinite(gap) else None
