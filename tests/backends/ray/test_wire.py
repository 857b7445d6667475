"""Prompts as deltas, errors as words, and how many replicas the waiting tokens ask for."""

import asyncio
import pickle

from hypothesis import given
from hypothesis import strategies as st

from streamrag import errors
from streamrag.backends.ray.options import wanted_replicas
from streamrag.backends.replicas.replica import PromptFeed
from streamrag.backends.replicas.wire import Delta, Failed, Open
from streamrag.core import Hint, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, StreamRagError

TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=8), TOKENS)
def test_a_feed_gives_the_prompts_that_were_sent_and_what_they_share(
    sent: list[tuple[tuple[int, ...], bool]], last: tuple[int, ...]
) -> None:
    """Each is pulled before the next comes, or overtaken by it; what comes twice changes nothing."""

    async def run() -> None:
        before: tuple[int, ...] = ()
        pulled: tuple[int, ...] = ()
        feed: PromptFeed | None = None
        for number, (token_ids, is_pulled) in enumerate([*sent, (last, True)], start=1):
            shared = common_prefix_len(before, token_ids)
            prompt = Prompt(token_ids, shared, number > len(sent), Hint(num_chunks=3), "search", draft=last)
            delta = pickle.loads(pickle.dumps(Delta.of(prompt, number=number, num_shared=shared)))
            if feed is None:
                feed = PromptFeed(delta)
                prompts = feed.prompts()
            else:
                feed.accept(delta)
                feed.accept(delta)
            before = token_ids
            if is_pulled:
                found = await anext(prompts)
                assert (found.token_ids, found.is_complete) == (token_ids, number > len(sent))
                assert (found.hint, found.source_name, found.draft) == (Hint(num_chunks=3), "search", last)
                assert found.num_shared <= common_prefix_len(pulled, token_ids)
                pulled = token_ids
        assert [prompt async for prompt in prompts] == []

    asyncio.run(run())


def test_a_delta_costs_four_bytes_a_new_token_and_a_hundred_or_so_for_itself() -> None:
    prompt = Prompt(tuple(range(8_000)), 7_900, is_complete=False)
    sizes = [len(pickle.dumps(Delta.of(prompt, number=2, num_shared=shared))) for shared in (7_900, 0)]
    assert 400 < sizes[0] < 700
    assert 32_000 < sizes[1] < 32_300


def test_a_ticket_stays_with_the_caller() -> None:
    first = Delta.of(Prompt((1, 2), 0, True), number=1, num_shared=0)
    sent = pickle.loads(pickle.dumps(Open("x", first, SamplingParams(max_tokens=3), "me", ticket=lambda: None)))
    assert sent == Open("x", first, SamplingParams(max_tokens=3), "me")


def test_every_error_of_ours_can_be_told_and_is_one_of_ours_again() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, StreamRagError):
            again = Failed(name, "it broke").to_error()
            assert type(again) is (BackendError if kind is errors.MissingDependencyError else kind)
            assert str(again) == "it broke"
    assert type(Failed("SomethingNew", "it broke").to_error()) is BackendError


def test_more_waiting_tokens_ask_for_more_replicas_and_none_for_one() -> None:
    def wanted(queued_tokens: float, current: int = 2, num_reports: int = 2) -> int:
        return wanted_replicas(queued_tokens, target=1_000, current=current, num_reports=num_reports)

    assert [wanted(tokens) for tokens in (0, 1, 1_000, 1_001, 7_500)] == [1, 1, 1, 2, 8]
    assert wanted(3_000, current=4, num_reports=2) == 6
    assert wanted(0, current=4, num_reports=0) == 4
