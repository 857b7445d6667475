from session_arms import ARMS, CACHED, INSIDE, UNCACHED, StockSession
from session_load import ShortPieces, samples
from session_loads import ingestion, window
from session_simulation import Device, simulated
from sessions_simulated import growing

from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile

DEVICE = Device(load_profile("l40s-llama8b"))


def test_a_sample_has_the_tokens_that_were_published() -> None:
    assert [len(ShortPieces().encode(f"{line}\n")) for line in samples(900)[::100]] == [16] * 9


def test_only_the_questions_own_tokens_are_computed_where_data_are_there_before() -> None:
    rows = {arm: run_virtual(growing(DEVICE, arm, 1, 1.0, num_cycles=2)) for arm in ARMS}
    contexts = {arm: [asked["num_tokens"] for asked in row["asked"]] for arm, row in rows.items()}
    assert len({tuple(sizes) for arm, sizes in contexts.items() if arm != INSIDE}) == 1
    computed = {arm: [a["num_tokens"] - a["num_cached"] for a in row["asked"]][-1] for arm, row in rows.items()}
    assert computed[UNCACHED] == contexts[UNCACHED][-1]
    assert 800 < computed[CACHED] < 1_000
    assert all(computed[arm] < 60 for arm in ARMS if arm not in (CACHED, UNCACHED))


def test_an_answer_stays_in_a_session_of_vllm_but_for_its_last_token() -> None:
    async def main() -> tuple[list[int], int]:
        async with simulated(DEVICE, is_stock=True) as site, StockSession(site.client) as stock:
            stock.put(range(2, 102))
            first = await stock.ask(range(2, 12), 3)
            second = await stock.ask(range(2, 12), 3)
            (request,) = site.engine.scheduler.requests.values()
            return [first.num_tokens, second.num_tokens], request.num_prompt_tokens

    sizes, num_prompt_tokens = run_virtual(main())
    assert sizes == [110, 122]
    assert num_prompt_tokens == 122


def test_data_faster_than_the_engine_are_dropped_and_counted() -> None:
    row = run_virtual(ingestion(DEVICE, rate=10_000, for_s=1.0))
    assert row["num_dropped"] > 0
    assert row["num_appended"] > row["num_dropped"]
    assert row["p99_behind_s"] > 0.1


def test_a_window_that_slides_in_small_steps_is_computed_more_often() -> None:
    small, large = (run_virtual(window(DEVICE, 100, share, num_windows=0.3, num_asked=5)) for share in (0.1, 0.75))
    assert small["num_slid"] > 0
    assert small["computed_per_token"] > 5
    assert 1 <= large["computed_per_token"] < 3
    assert small["mean_kept_of_window"] > large["mean_kept_of_window"]
