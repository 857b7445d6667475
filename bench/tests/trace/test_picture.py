from pathlib import Path

import pytest

from streamrag.errors import MissingDependencyError
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.trace.picture import draw_trace
from streamrag_bench.trace.statistics import describe


def crawl(num_queries: int) -> Trace:
    return Trace(
        tuple(
            TracedQuery(
                str(n),
                float(n),
                "why?",
                tuple(TracedAppend(0.1 * i + n, TracedChunk(f"{n}-{i}", 10 ** (i % 6))) for i in range(n % 7)),
                n + 1.0,
            )
            for n in range(num_queries)
        )
    )


PLAIN = Trace((TracedQuery("1", 0.0, "", (TracedUpdate(0.0, (TracedChunk("a", 3),)),), 0.0, num_output_tokens=3),))


@pytest.mark.parametrize("trace", [crawl(50), crawl(1), PLAIN, Trace(())], ids=["crawl", "one query", "plain", "empty"])
def test_any_trace_can_be_drawn(trace: Trace, tmp_path: Path) -> None:
    draw_trace(tmp_path / "x.png", trace, describe(trace), title="A $trace$ of x_1")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_its_install_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[plot\]'"):
        draw_trace(tmp_path / "x.png", PLAIN, describe(PLAIN), title="x")
