"""Structured output, of plain requests and of streams. vLLM lets a request wait until its grammar is compiled."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus

Make = Callable[..., Any]
TOKENS = list(range(40))


class AnyText:
    """A grammar that everything follows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        self.tokens += tokens
        return True

    def is_terminated(self) -> bool:
        return False


def structured(b: Any, name: str = "structured", first: int = 3_000, num_tokens: int = 10) -> Future[Any]:
    """A request, and its grammar, which is being compiled."""
    params = SamplingParams(max_tokens=3, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
    b.engine.add(name, list(range(first, first + num_tokens)), params)
    grammar: Future[Any] = Future()
    request = b.scheduler.requests[name]
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request.grammar = grammar
    return grammar


def crowd(b: Any) -> Callable[[], None]:
    """More work than the engine can do, always, of requests that each came later than the structured one."""
    b.plain("load 0", 60, first=0)

    def refill() -> None:
        while len(b.scheduler.requests) < 12:
            number = len(b.outputs) + len(b.scheduler.requests)
            b.plain(f"load {b.engine.num_steps} {number}", 60, first=100 * number, max_tokens=1)

    return refill


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 16}])
def test_a_ready_grammar_is_served_in_its_turn_however_long_the_queue_is(
    bench: Make, is_async: bool, limit: dict[str, int]
) -> None:
    b = bench(is_async=is_async, streamrag={"policy": "arrival"}, **limit)
    refill = crowd(b)
    grammar = structured(b)
    refill()
    b.step()
    grammar.set_result(AnyText())
    for _ in range(60):
        refill()
        b.step()
        if b.num_finishes("structured"):
            break
    assert b.tokens("structured") == b.fresh_answer(list(range(3_000, 3_010)), max_tokens=3)


def test_a_request_whose_grammar_is_not_ready_delays_no_other_and_starts_later(bench: Make) -> None:
    b = bench()
    grammar = structured(b)
    b.chunk("s", TOKENS)
    b.plain("p", 30, first=500)
    for _ in range(20):
        b.step()
    assert len(b.tokens("p")) == 2
    assert "s" in b.scheduler.plugin.queues.idle
    assert b.engine.has_work  # as in vLLM, which looks again and again
    assert b.tokens("structured") == []
    grammar.set_result(AnyText())
    b.run()
    assert len(b.tokens("structured")) == 3
    assert not b.scheduler.deferred_waiting


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone_however_long_the_queue_is(bench: Make) -> None:
    b = bench(max_num_seqs=2)
    refill = crowd(b)
    grammar = structured(b)
    refill()
    b.step()
    grammar.set_exception(ValueError("no such grammar"))
    b.step()
    assert b.num_finishes("structured") == 1
    assert b.tokens("structured") == []
    b.run()
    assert all(b.num_finishes(o.request_id) == 1 for o in b.outputs)


def test_a_request_aborted_while_its_grammar_is_compiled_leaves_nothing(bench: Make) -> None:
    b = bench()
    structured(b)
    b.step()
    b.engine.abort("structured")
    b.check_empty()
    assert not b.scheduler.deferred_waiting


LETTERS = StructuredOutputsParams(regex="[a-z]*")


def completed(b: Any) -> Future[Any]:
    """A stream whose chunks all have the grammar, until its last one; and that one's grammar."""
    b.chunk("s", TOKENS[:20], structured_outputs=LETTERS)
    b.run()
    assert "s" in b.scheduler.plugin.queues.idle  # the first chunk's grammar keeps nothing waiting
    b.chunk("s", TOKENS[10:30], kept=10, structured_outputs=LETTERS)
    b.step()
    assert not b.scheduler.requests["s"].use_structured_output
    b.chunk("s", TOKENS[30:], kept=30, is_complete=True, structured_outputs=LETTERS)
    grammar: Future[Any] = Future()
    b.scheduler.requests["s"].structured_output_request.grammar = grammar
    return grammar


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_is_answered_when_the_grammar_of_its_last_chunk_is_ready(bench: Make, is_async: bool) -> None:
    b = bench(is_async=is_async)
    grammar = completed(b)
    for _ in range(10):
        b.step()
    assert b.engine.has_work
    assert b.tokens("s") == []
    any_text = AnyText()
    grammar.set_result(any_text)
    b.run()
    assert b.tokens("s") == b.fresh_answer(TOKENS) == any_text.tokens
    b.check_empty()


def test_a_stream_whose_grammar_cannot_be_compiled_fails(bench: Make) -> None:
    b = bench()
    completed(b).set_exception(ValueError("no such grammar"))
    b.run()
    assert (b.tokens("s"), b.num_finishes("s")) == ([], 3)  # two acknowledgements, and the error
    b.check_empty()


def test_a_stream_that_is_aborted_or_evicted_while_its_grammar_is_compiled_leaves_nothing(bench: Make) -> None:
    b = bench()
    grammar = completed(b)
    b.step()
    b.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not b.scheduler.plugin.queues.idle
    grammar.set_result(AnyText())
    b.run()
    assert b.tokens("s") == b.fresh_answer(TOKENS)
    b.chunk("t", TOKENS, is_complete=True, structured_outputs=LETTERS)
    b.step()
    b.engine.abort("t")
    b.check_empty()
