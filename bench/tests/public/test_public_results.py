"""The public benchmark's result files, and the page that compares them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrag.errors import ConfigurationError
from streamrag_bench.public.page import make_page
from streamrag_bench.public.results import METRICS, PublicResult, QueryTimes, read_result, write_result
from streamrag_bench.public.workload import PublicLoad


def result(name: str = "vllm", *, first_s: float = 2.0, **changes: Any) -> PublicResult:
    answered = [
        QueryTimes(id=f"q{i}", seed=1, retrieval_end_s=1.0, first_token_s=first_s + i / 100, last_token_s=4.0)
        for i in range(10)
    ]
    values: dict[str, Any] = {
        "name": name,
        "engine": "vllm",
        "is_simulated": False,
        "hardware": "2 cores",
        "model": "tiny",
        "load": PublicLoad(num_queries=12, num_warm_up=1),
        "seeds": (1,),
        "provenance": {"vllm": "0.32"},
        "queries": (*answered, QueryTimes(id="late", seed=1, error="it was not answered")),
    }
    return PublicResult(**{**values, **changes})


def test_a_result_is_read_as_it_was_written_and_has_its_percentiles_for_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    write_result(result(), path)
    assert read_result(path) == result()
    written = json.loads(path.read_text())
    assert written["format"] == 1
    assert written["num_failed"] == 1
    assert list(written["summary"]) == list(METRICS)
    assert written["summary"]["first_token_after_retrieval_s"] == {"p50": pytest.approx(1.05)}  # P95 is of the failure
    assert written["summary"]["last_token_s"] == {"p50": 4.0}


ONE = PublicLoad(num_queries=2, num_warm_up=1)


def test_failed_queries_count_as_infinite_times() -> None:
    failed = result(load=ONE, queries=(QueryTimes(id="a", seed=1, error="no"),))
    assert failed.num_failed == 1
    assert failed.percentiles("first_token_s") == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda v: v.update(format=2), "has format 2, and this version reads only format 1"),
        (lambda v: v.update(format="x" * 1000), "has format x{40},"),
        (lambda v: v.pop("format"), "has format None"),
        (lambda v: v.update(benchmark="other"), 'no "benchmark"'),
        (lambda v: v.update(engine="other"), "engine"),
        (lambda v: v.update(more=1), "more"),
        (lambda v: v.update(queries=[]), "queries"),
        (lambda v: v["queries"][0].update(first_token_s=None), "either an error or all three"),
        (lambda v: v["queries"][0].update(first_token_s=9.0), "the last token last"),
        (lambda v: v["queries"][0].update(first_token_s="1"), "first_token_s"),
        (lambda v: v["load"].update(qps=-1), "qps"),
        (lambda v: v["load"].update(num_queries=13), "11 queries; there must be 12 of each seed"),
        (lambda v: v.update(seeds=[1, 2], queries=v["queries"] * 2), "22 queries; there must be 11 of each seed"),
        (lambda v: v["queries"][1].update(id="q0"), "with different ids"),
        (lambda v: v.update(seeds=[1, 1]), "must be different"),
    ],
)
def test_a_broken_or_unknown_file_is_an_error_that_says_why(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    path = tmp_path / "a.json"
    write_result(result(), path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match=problem):
        read_result(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10_000, b'{"format": NaN}'])
def test_any_other_file_is_no_result(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a result of `streamrag bench public`"):
        read_result(tmp_path / "a.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_result(tmp_path / "none.json")


def test_the_page_compares_with_the_first_and_marks_what_is_simulated() -> None:
    fast = result("ours <b>", first_s=1.5, is_simulated=True, hardware="2 x H200")
    page = make_page([result(), fast])
    text = re.sub(r"<[^>]+>", " ", page)
    assert "measured and simulated" in text
    assert "ours &lt;b&gt; is simulated, not measured; the hardware 2 x H200 was not used" in text
    assert page.count("<small>simulated</small>") == len(METRICS)
    assert "0.524x" in text  # 0.55 of 1.05 s
    assert "–x" not in text
    assert " 0x" not in text  # of a percentile that is infinite
    assert "vllm: 1 of 11 queries failed" in text
    assert "do not compare" not in text
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.rstrip().endswith("</html>")


def test_the_page_warns_of_other_loads_and_works_without_an_answer() -> None:
    other = result("other", load=PublicLoad(qps=2.0, num_queries=12, num_warm_up=1), num_short_answers=3)
    none = result("none", load=ONE, queries=(QueryTimes(id="a", seed=1, error="no"),))
    text = make_page([none, other])
    assert "other has another load than none (qps, num_queries): do not compare the two" in text
    assert "none: 1 of 1 queries failed" in text
    assert "other: 3 answers were shorter than the load says" in text


def test_provenance_hides_no_field_of_the_result() -> None:
    page = make_page([result(provenance={"kind": "measured by hand", "model": "huge", "qps": 9})])
    assert "kind: measured; " in page
    assert "by hand" not in page
    assert "model: tiny" in page
    assert "qps: 1.0" in page
