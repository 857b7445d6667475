"""StreamServe's ablation in kind: what its tables say of the work, and small runs of its arms."""

import math
import statistics
from dataclasses import replace

import pytest
from lane_play import LATENCY_S, Way, play
from routing.loads import Piece, Query
from simulated_lanes import LaneOptions
from streamserve import (
    ARMS,
    DATASETS,
    LOADS,
    PUBLISHED_ALL,
    PUBLISHED_DATASETS,
    Published,
    mean_of,
    profile,
    queries_of,
    report,
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
    for dataset in DATASETS:
        varied = [query.num_output for query in queries_of(dataset, 233, 0.6)]
        assert statistics.mean(varied) == pytest.approx(233, abs=0.5)
        assert statistics.stdev(math.log(num) for num in varied) == pytest.approx(0.6, rel=0.05)
        assert varied == [query.num_output for query in queries_of(dataset, 233, 0.6)], "seeded"
    assert varied != sorted(varied)


def test_prompts_are_simulated_to_the_token():
    for dataset in DATASETS:
        prompts = [query.texts[-1][1][0].num_tokens for query in queries_of(dataset, 18, 0.6)]
        assert statistics.mean(prompts) == pytest.approx(dataset.num_prompt, abs=0.5)
        for name in ("StreamServe, all of it", "monolithic: one engine"):
            row = run(replace(NAMED[name], num_answer=18), dataset, 16, 0.6)
            assert row.tokens_per_s * row.latency_s == pytest.approx(dataset.num_prompt + 18, abs=1)


def test_a_prompt_that_crosses_a_link_has_its_exact_bytes():
    class Steps:
        kv_tokens = 1_000

        def step_s(self, parts):
            return 0.5

    query = Query(0.0, ((0.0, (Piece(1, 21),)),), 3)
    way = Way("pairs", 2, 1, link_bytes_s=1.0, kv_bytes_per_token=1)
    (timing,) = play([query], way, LaneOptions(Steps(), 64, block_size=1)).timings
    assert (timing.num_prompt, timing.num_sent) == (21, 21)
    assert timing.first_s == pytest.approx(0.5 + LATENCY_S + 21 + 0.5)


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


def test_tables_are_markdown_with_all_arms_and_datasets():
    of_one = [run(ARMS[0], dataset, *LOADS[1]) for dataset in DATASETS]
    rows = [
        replace(row, arm=arm.name, at_once=at_once, sigma=sigma)
        for row in of_one
        for arm in ARMS
        for at_once, sigma in LOADS
    ]
    tables = report(rows)
    assert "| SUM | 528 + 700 | 238 + 939 | 20 + 651 |" in tables
    assert "| SUM | 2,235, .300, 15.3 | " in tables
    for arm in ARMS:
        assert f"| {arm.name} | " in tables
    for table in tables.split("## ")[1:]:
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1, table


def test_an_engine_of_each_arm_has_its_share_of_four_gpus():
    assert {arm.num_gpus for arm in ARMS} == {1, 4}
    assert profile(4).kv_tokens > 4 * profile(1).kv_tokens > 100_000
