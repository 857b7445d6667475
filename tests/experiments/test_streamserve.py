"""StreamServe's ablation in kind: what its tables say of the work, and small runs of its arms."""

import pytest
from streamserve import (
    ARMS,
    DATASETS,
    PUBLISHED_ALL,
    PUBLISHED_DATASETS,
    Published,
    mean_of,
    profile,
    queries_of,
    run,
)

NAMED = {arm.name: arm for arm in ARMS}


def test_a_latency_has_room_for_as_many_tokens_as_its_time_per_token_says():
    assert Published(100, 3.0, 0.015).most_answer == pytest.approx(200)
    assert Published(100, 3.0, 0.015).num_tokens == pytest.approx(300)
    assert PUBLISHED_ALL.most_answer == pytest.approx(18, abs=0.1)
    for data_parallel, tensor_parallel, streamserve in PUBLISHED_DATASETS.values():
        assert tensor_parallel.most_answer > 10 * streamserve.most_answer
        assert data_parallel.most_answer > 2 * tensor_parallel.most_answer


def test_prompts_have_the_length_that_follows_from_the_published_rows():
    for dataset in DATASETS:
        row = PUBLISHED_DATASETS[dataset.name][2]
        assert dataset.num_prompt == pytest.approx(row.num_tokens - row.most_answer, abs=1)


def test_answers_are_of_one_length_or_vary_about_it():
    assert {query.num_output for query in queries_of(DATASETS[0], 233, 0.0)} == {233}
    varied = [query.num_output for query in queries_of(DATASETS[0], 233, 0.6)]
    assert sum(varied) / len(varied) == pytest.approx(233, rel=0.15)


def test_without_drafts_the_baselines_take_the_published_time_per_token():
    for name in ("four engines, no drafts (DP)", "one engine, no drafts (TP)"):
        arm = NAMED[name]
        rows = [run(arm, dataset, 16, 0.0) for dataset in DATASETS]
        assert arm.published
        assert mean_of(rows, name, 16, 0.0).tpot_s == pytest.approx(arm.published.tpot_s, rel=0.03)


def test_equal_times_per_token_are_equal_latencies_unless_the_work_differs():
    rows = {name: run(NAMED[name], DATASETS[1], 16, 0.0) for name in NAMED}
    none, short = rows["no SpecuStream"], rows["no SpecuStream, 18 tokens"]
    assert none.tpot_s == pytest.approx(short.tpot_s, rel=0.1)
    assert none.latency_s > 8 * short.latency_s
    assert rows["StreamServe, all of it"].tpot_s < 0.6 * none.tpot_s, "drafts that hold show in the time per token"
    assert rows["not adaptive: depth 5"].latency_s == pytest.approx(rows["StreamServe, all of it"].latency_s, rel=0.1)


def test_an_engine_of_each_arm_has_its_share_of_four_gpus():
    assert {arm.num_gpus for arm in ARMS} == {1, 4}
    assert profile(4).kv_tokens > 4 * profile(1).kv_tokens > 100_000
