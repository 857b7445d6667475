"""What a question to a session computes, beside one as a plain request."""

from streamrag.backends.simulated.virtual_time import run_virtual
from studies.sessions.prices import ShortPieces, samples
from studies.sessions.run import ARMS, CACHED, UNCACHED, growing


def test_a_sample_has_the_tokens_that_were_published() -> None:
    assert [len(ShortPieces().encode(f"{line}\n")) for line in samples(900)[::100]] == [16] * 9


def test_questions_compute_only_their_own_tokens_where_the_data_were_there_before() -> None:
    last = {arm: run_virtual(growing("L40S", arm, 1.0, num_cycles=2))[-1] for arm in ARMS}
    assert len({asked.num_tokens for asked in last.values()}) == 1
    assert last[UNCACHED].num_computed == last[UNCACHED].num_tokens
    assert 800 < last[CACHED].num_computed < 1_000
    assert all(last[arm].num_computed < 60 for arm in ARMS if arm not in (CACHED, UNCACHED))
