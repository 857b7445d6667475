import asyncio
import random
import statistics
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from small_loads import APPENDS, UPDATES, appending, random_query, settings, updating

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import Hint
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.trace.statistics import contexts
from streamrag_bench.workload import (
    NUM_TAIL_TOKENS,
    Arriving,
    PromptChange,
    Tokens,
    fit_contexts,
    load_trace,
    longest_prompt,
    make_load,
    token_budget,
)


def pieces_of(query: TracedQuery) -> tuple[list[tuple[float, PromptChange]], float | None]:
    async def main() -> tuple[list[tuple[float, PromptChange]], float | None]:
        arriving = Arriving(query, Tokens(), 0.0)
        found = [(asyncio.get_running_loop().time(), piece) async for piece in arriving]
        return found, arriving.end_s

    return run_virtual(main())


def test_equal_keys_have_equal_tokens_and_other_keys_others() -> None:
    tokens = Tokens(num_in_vocabulary=1_000)
    first = tokens.of_chunk(TracedChunk("a", 500))
    assert tokens.of_chunk(TracedChunk("a", 500)) == first
    assert tokens.of_chunk(TracedChunk("b", 500)) != first
    assert len(first) == 500
    assert max(first) < 1_000
    assert len(set(Tokens().of_chunk(TracedChunk("a", 5_000)))) > 4_000


def test_the_trace_keeps_its_own_arrivals_from_zero() -> None:
    trace = Trace(tuple(appending(f"q{i}", 10.0 + i, 100) for i in range(3)))
    assert [q.arrival_s for q in make_load(settings(), trace)] == [0.0, 1.0, 2.0]


def test_poisson_arrivals_have_their_rate_and_their_seed() -> None:
    trace = Trace(tuple(appending(f"q{i}", 0.0, 100) for i in range(2_000)))
    arrivals, again, other = ([q.arrival_s for q in make_load(settings(qps=4.0, seed=s), trace)] for s in (1, 1, 2))
    assert arrivals == again != other
    assert arrivals == sorted(arrivals)
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_delay_stretches_the_gaps_but_not_the_first_chunk_nor_the_end() -> None:
    query = updating("u", 0.0, ("a",), ("b",), ("c",))
    (stretched,) = make_load(settings(delay=10.0), Trace((query,)))
    assert [event.at_s for event in stretched.events] == pytest.approx([0.3, 3.3, 6.3])
    assert stretched.end_s == pytest.approx(6.5)


def test_delay_stretches_hints_too() -> None:
    events = (TracedAppend(1.0, TracedChunk("a", 5), Hint(1, 2.0)), TracedAppend(3.0, TracedChunk("b", 5)))
    (stretched,) = make_load(settings(delay=3.0), Trace((TracedQuery("q", 0.0, "", events, 3.0),)))
    assert stretched.events[0].hint == Hint(1, 6.0)


def test_pieces_come_when_they_arrive_and_the_question_stands_last() -> None:
    query = appending("q", 1.0, 100, 50)
    tokens = Tokens()
    pieces, end_s = pieces_of(query)
    first, second = (tokens.of_chunk(event.chunk) for event in query.events if isinstance(event, TracedAppend))
    assert pieces == [
        (1.5, PromptChange(first, is_append=True, is_complete=False)),
        (2.0, PromptChange(second + tokens.of_tail(query), is_append=True, is_complete=True)),
    ]
    assert end_s == 2.0


def test_the_question_waits_for_the_end_of_retrieval() -> None:
    query = updating("u", 0.0, ("a", "b"), ("b", "a"))
    pieces, end_s = pieces_of(query)
    assert [(round(at_s, 9), len(p.token_ids), p.is_append, p.is_complete) for at_s, p in pieces] == [
        (0.3, 1_400, False, False),
        (0.6, 1_400, False, False),
        (0.8, NUM_TAIL_TOKENS, True, True),
    ]
    assert end_s == pytest.approx(0.8)


def test_a_query_that_finds_nothing_is_its_question() -> None:
    pieces, end_s = pieces_of(TracedQuery("q", 0.0, "", (), 0.7))
    assert [(at_s, len(piece.token_ids), piece.is_complete) for at_s, piece in pieces] == [(0.7, NUM_TAIL_TOKENS, True)]
    assert end_s == 0.7


def test_the_longest_prompt_may_be_one_that_shrank() -> None:
    shrinking = updating("u", 0.0, ("a", "b", "c"), ("a",))
    assert longest_prompt([shrinking]) == 2_100 + NUM_TAIL_TOKENS
    assert longest_prompt(APPENDS.queries) == 900 + 1_570 + 2_500 + 300 + NUM_TAIL_TOKENS


def test_budgets_are_the_published_ones_unless_set() -> None:
    budgets = [token_budget(settings(workload=w)) for w in ("crawler", "anns", "anns-last", "my.jsonl")]
    assert budgets == [2_048, 8_192, 8_192, 2_048]
    assert token_budget(settings(workload="anns", max_num_batched_tokens=512)) == 512


def test_generated_workloads_have_the_queries_that_are_asked() -> None:
    trace = load_trace(settings(workload="anns", qps=1.0, num_queries=7))
    assert len(trace.queries) == 7
    assert trace == load_trace(settings(workload="anns", qps=1.0, num_queries=7))


def test_the_long_window_of_a_search_stands_first_or_last() -> None:
    first, last = (load_trace(settings(workload=w, qps=1.0, num_queries=50)) for w in ("anns", "anns-last"))
    idle_s = [[q.end_s - q.events[0].at_s for q in trace.queries] for trace in (first, last)]
    assert statistics.mean(idle_s[1]) > 4 * statistics.mean(idle_s[0])
    assert [q.end_s for q in first.queries] == pytest.approx([q.end_s for q in last.queries])


def test_loads_that_cannot_be_are_refused() -> None:
    twice = Trace((appending("q", 0.0, 10), appending("q", 1.0, 10)))
    for changes, trace, named in (
        ({"qps": 0.0}, UPDATES, "qps=0.0"),
        ({"delay": -1.0}, UPDATES, r"delay=-1\.0"),
        ({}, Trace(()), "the trace has 0 queries"),
        ({}, twice, "same id"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            make_load(settings(**changes), trace)
    for changes, named in (({}, "give --qps"), ({"workload": "nowhere.jsonl"}, "'nowhere.jsonl'")):
        with pytest.raises(ConfigurationError, match=named):
            load_trace(settings(**changes))


# ---------------------------------------------------------------------------------------------------------- budgets


def context_sizes(query: TracedQuery) -> list[int]:
    return [sum(chunk.num_tokens for chunk in context) for context in contexts(query.events)]


def test_contexts_keep_to_the_model_s_length_as_those_of_a_pipeline_do() -> None:
    queries = (
        appending("grows", 0.0, 600, 500, 300, 100),  # the second does not fit, and the third still does
        updating("changes", 0.0, ("a", "b"), ("c",), ("b", "a")),
        appending("small", 0.0, 1_000),
        appending("large", 0.0, 2_000),
    )
    load = fit_contexts(settings(num_output_tokens=7), queries, 1_000 + NUM_TAIL_TOKENS + 7 + 1)
    assert (load.max_context_tokens, load.num_cut) == (1_000, 3)
    assert [context_sizes(query) for query in load.queries] == [[600, 900, 1_000], [700, 700, 700], [1_000], []]
    assert [query.end_s for query in load.queries] == [query.end_s for query in queries]
    assert longest_prompt(load.queries) == 1_000 + NUM_TAIL_TOKENS
    pieces, _ = pieces_of(load.queries[3])
    assert [(len(piece.token_ids), piece.is_complete) for _, piece in pieces] == [(NUM_TAIL_TOKENS, True)]


def test_an_empty_update_empties_the_context() -> None:
    chunks = TracedAppend(0.1, TracedChunk("a", 600)), TracedUpdate(0.2, ()), TracedAppend(0.3, TracedChunk("b", 700))
    query = TracedQuery("q", 0.0, "", chunks, end_s=0.3)
    load = fit_contexts(settings(max_context_tokens=1_000), [query], None)
    assert (load.queries, load.num_cut) == ((query,), 0)
    pieces, _ = pieces_of(query)
    assert [(len(piece.token_ids), piece.is_append, piece.is_complete) for _, piece in pieces] == [
        (600, True, False),
        (700 + NUM_TAIL_TOKENS, False, True),
    ]
    pieces, _ = pieces_of(replace(query, events=chunks[:2]))
    assert [(len(piece.token_ids), piece.is_append) for _, piece in pieces] == [(600, True), (NUM_TAIL_TOKENS, False)]


def test_a_pipeline_leaves_out_the_same_chunks() -> None:
    rng = random.Random(5)
    for number in range(50):
        query = random_query(f"q{number}", rng, can_update=number % 2 == 0)
        budget = rng.randrange(4_000, 9_000)  # any one chunk fits
        (cut,) = fit_contexts(settings(max_context_tokens=budget), [query], None).queries
        expected = []
        for context in contexts(query.events):
            left, kept = budget, []
            for chunk in context:
                if chunk.num_tokens <= left:
                    left -= chunk.num_tokens
                    kept.append(chunk.key)
            expected.append(kept)
        found = [[chunk.key for chunk in context] for context in contexts(cut.events)]
        assert [k for k, _ in groupby(found)] == [k for k, _ in groupby(expected)]


def test_a_budget_is_the_smaller_of_what_is_set_and_what_there_is_room_for() -> None:
    query = appending("q", 0.0, 100)
    assert fit_contexts(settings(max_context_tokens=50), [query], 4_096).max_context_tokens == 50
    assert (
        fit_contexts(settings(max_context_tokens=5_000), [query], 4_096).max_context_tokens
        == 4_096 - NUM_TAIL_TOKENS - 2
    )
    assert fit_contexts(settings(), [query], None).max_context_tokens is None
    for changes, length, message in (
        ({"max_context_tokens": 0}, 4_096, "max_context_tokens=0 must be greater than or equal to 1"),
        ({"num_output_tokens": 4_000}, 4_000, "has no room for a context beside 32 of the question and 4000"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            fit_contexts(settings(**changes), [query], length)


def test_a_generated_workload_is_the_same_with_hints_but_for_the_hints() -> None:
    for name in ("crawler", "anns-last"):
        plain, hinted, exact = (
            settings(workload=f"{name}{ending}", qps=2.0, num_queries=10) for ending in ("", "-hints", "-oracle")
        )
        assert token_budget(plain) == token_budget(hinted) == token_budget(exact)
        loads = [make_load(each, load_trace(each)) for each in (plain, hinted, exact)]
        assert len({tuple(event.at_s for query in load for event in query.events) for load in loads}) == 1
        hints = [[event.hint for query in load for event in query.events] for load in loads]
        assert set(hints[0]) == {None}
        assert None not in hints[1] + hints[2]
        assert hints[1] != hints[2]
