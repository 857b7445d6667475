"""Advice on streaming: what it says of traces that gain, and of those that do not."""

import json
from pathlib import Path

import pytest
from small_loads import APPENDS, PROFILE, appending, updating

from streamrag.bench.advice.advice import ARMS, MEDIAN_ERROR, RUN_ERROR, Advice, advise, first_token, name_of
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace

RESULTS = Path(__file__).resolve().parents[3] / "experiments" / "results"
SMALL = {"kv_tokens": 200_000, "num_output_tokens": 2}


def saved_s(advice: Advice, backend: str) -> float:
    (verdict,) = [verdict for verdict in advice.verdicts if name_of(verdict).startswith(backend)]
    change = first_token(verdict, "p50")
    return change.baseline_s - change.arm_s


def test_appends_over_seconds_gain_and_the_settings_say_how() -> None:
    advice = advise(
        Trace(tuple(appending(f"q{i}", 3.0 * i, 9_000, 9_000, 9_000, 300) for i in range(8))), PROFILE, **SMALL
    )
    assert saved_s(advice, "VllmBackend") > 0.1
    assert saved_s(advice, "OpenAIBackend") > 0.1
    assert advice.settings[1] == "VllmBackend: Pipeline(..., mode=AppendMode(), overlap=True)"
    assert advice.reasons == ()
    assert advice.hardware == "2 x NVIDIA H200 SXM 141 GB"


def test_retrieval_that_arrives_at_once_gains_nothing_and_the_reasons_say_why() -> None:
    advice = advise(Trace(tuple(appending(f"q{i}", float(i), 400) for i in range(8))), PROFILE, **SMALL)
    assert saved_s(advice, "VllmBackend") == pytest.approx(0.0, abs=0.01)
    assert "In 8 of 8 queries, everything arrives at once" in advice.reasons[0]
    assert "Prompts are short" in advice.reasons[1]
    assert advice.settings[1] == "VllmBackend: Pipeline(...) as it is, which learns whether to stream"


def test_changing_contexts_and_a_saturated_engine_are_named() -> None:
    late = Trace(tuple(appending(f"q{i}", 0.001 * i, 20_000, 20_000, 20_000) for i in range(8)))
    assert any("saturated" in reason for reason in advise(late, PROFILE, **SMALL).reasons)
    changing = Trace(tuple(updating(f"u{i}", 0.2 * i, ("a", "b", "c"), ("a", "d", "e")) for i in range(8)))
    advice = advise(changing, PROFILE, qps=[2.0], **SMALL)
    assert any("The median update changes 67% of the context" in reason for reason in advice.reasons)
    assert {name_of(verdict) for verdict in advice.verdicts} == {
        "OpenAIBackend, 2 QPS",
        "VllmBackend, 2 QPS",
    }


def test_advice_is_marked_as_simulated_and_states_its_error() -> None:
    values = json.loads(json.dumps(advise(APPENDS, PROFILE, **SMALL).as_json()))
    assert values["is_simulated"] is True
    assert values["format"] == 1
    assert "0.94 to 1.13 times those of a real engine" in values["error"]
    assert values["verdicts"][0]["headline"]


def test_the_error_is_that_of_the_validity_benchmark() -> None:
    rows = [row for row in json.loads((RESULTS / "validity.json").read_text())["results"] if row["arm"] in ARMS]
    assert len(rows) == len(ARMS)
    medians = [row[rank]["ratio"] for row in rows for rank in ("p50", "p95")]
    runs = [ratio for row in rows for rank in ("p50", "p95") for ratio in row[rank]["ratios"]]
    assert (round(min(medians), 2), round(max(medians), 2)) == MEDIAN_ERROR
    assert (round(min(runs), 2), round(max(runs), 2)) == RUN_ERROR


def test_an_unknown_profile_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no profile 'b200'"):
        advise(APPENDS, "b200")
