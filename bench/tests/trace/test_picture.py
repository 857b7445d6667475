from pathlib import Path

import pytest
from matplotlib.text import Text

from streamrag.display_text import one_line
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.report.canvas import for_picture
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


@pytest.mark.parametrize("text", ["$x$", "$\\frac{$", "\\$5 and $6", "$", "\x1b[2J $\ud800$"])
def test_a_picture_takes_no_text_for_a_formula(text: str, tmp_path: Path) -> None:
    drawn, is_formula = Text(0, 0, for_picture(text))._preprocess_math(for_picture(text))  # type: ignore[attr-defined]
    assert (drawn, is_formula) == (one_line(text), False)
    trace = Trace((TracedQuery("1", 0.0, text, (), 1.0),))
    draw_trace(tmp_path / "x.png", trace, describe(trace), title=text)


def test_a_long_text_is_shortened_in_a_picture() -> None:
    assert for_picture("x" * 500) == "x" * 120 + "…"
