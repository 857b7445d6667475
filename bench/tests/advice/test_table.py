"""Tables of events as Excel, R and others write them."""

from pathlib import Path

import pytest

from streamrag.errors import TraceError
from streamrag.trace.values import Trace, TracedAppend
from streamrag_bench.advice.logs import read_log

PAGE = "1,question,12.0\n1,chunk:310,12.4\n1,chunk,12.4\n1,end,13.1\n"
"""The example of docs/advise.md."""
HEADING = "query,event,seconds\n"


def read(tmp_path: Path, content: bytes) -> Trace:
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    return read_log(path, 250)


def shape(trace: Trace) -> tuple[float, list[tuple[float, int]]]:
    (query,) = trace.queries
    chunks = [(round(each.at_s, 6), each.chunk.num_tokens) for each in query.events if isinstance(each, TracedAppend)]
    return round(query.end_s, 6), chunks


EUROPEAN = (HEADING + PAGE).replace(",", ";").replace(".", ",")
QUOTED = '"query","event","seconds"\n"1","question",12\n"1","chunk:310",12.4\n"1","chunk",12.4\n"1","end",13.1\n'
NOTES = HEADING.replace("\n", ",note\n") + PAGE.replace("\n", ',5" disk\n')
LINES = HEADING.replace("\n", ",text\n") + PAGE.replace("\n", ',"Is ""this""\n\na cell?"\n')
R = '"","query","event","seconds"\n"1",1,"question",12\n"2",1,"chunk:310",12.4\n"3",1,"chunk",12.4\n"4",1,"end",13.1\n'


@pytest.mark.parametrize(
    ("content", "separator"),
    [
        (PAGE, ","),
        (HEADING + PAGE, ","),
        (HEADING.upper() + PAGE, ","),
        ("\ufeff" + PAGE, ","),
        ("\ufeff" + HEADING + PAGE, ","),
        (("\ufeff" + HEADING + PAGE).replace("\n", "\r\n"), ","),
        ((HEADING + PAGE).replace("\n", "\r"), ","),
        (HEADING + PAGE + "\n\n  \n", ","),
        (HEADING + PAGE + ",,\n,,\n", ","),
        (PAGE.replace("\n", ",,\n"), ","),
        (EUROPEAN, ";"),
        (EUROPEAN + ";;\r\n", ";"),
        (EUROPEAN.removeprefix("query;event;seconds\n"), ";"),
        ("\ufeffsep=;\r\n" + EUROPEAN, ";"),
        ((HEADING + PAGE).replace(",", "\t"), "\t"),
        (EUROPEAN.replace(";", "\t"), "\t"),
        ((HEADING + PAGE).replace(",", "|"), "|"),
        (QUOTED, ","),
        ("\ufeff" + QUOTED, ","),
        (QUOTED.replace(",", ";").replace("12.4", "12,4").replace("13.1", '"13,1"'), ";"),
        (R, ","),
        (R.removeprefix('"",'), ","),
        (NOTES, ","),
        (LINES, ","),
        ("\ufeff" + LINES.replace(",", ";").replace("\n", "\r\n"), ";"),
        (QUOTED.replace(",", ", "), ","),
        (R.replace(",", ";").replace(".", ","), ";"),
        ('"event","seconds","query"\n"question",12,1\n"chunk:310",12.4,1\n"chunk",12.4,1\nend,13.1,1\n', ","),
        (PAGE.replace("12.4", '"12,4"').replace("13.1", '"13,1"'), ","),
        (PAGE.replace("12.0", "1.2e+01").replace("13.1", "1.31E1"), ","),
        (EUROPEAN.replace("12,0", "1,2e+01").replace("13,1", "1,31E1"), ";"),
        (PAGE.replace("12.", "1764252012.").replace("13.", "1764252013."), ","),
        (EUROPEAN.replace("12,", "1.764.252.012,").replace("13,", "1.764.252.013,"), ";"),
        (EUROPEAN.replace("12,", "1 764 252 012,").replace("13,", "1\u202f764\u202f252\u202f013,"), ";"),
        (PAGE.replace("question", "Question").replace("chunk", "CHUNKS").replace("end", " End "), ","),
    ],
)
def test_the_example_of_the_page_is_read_as_programs_write_it(tmp_path: Path, content: str, separator: str) -> None:
    trace = read(tmp_path, content.encode())
    assert shape(trace) == (1.1, [(0.4, 310), (0.4, 250)])
    assert trace.provenance["separator"] == separator


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
@pytest.mark.parametrize("content", [EUROPEAN, QUOTED, EUROPEAN.replace(";", "\t").replace("\n", "\r\n")])
def test_a_byte_order_mark_tells_the_encoding(tmp_path: Path, content: str, encoding: str) -> None:
    assert shape(read(tmp_path, content.encode(encoding))) == (1.1, [(0.4, 310), (0.4, 250)])
    if encoding == "utf-16":
        big = b"\xfe\xff" + content.encode("utf-16-be")
        assert shape(read(tmp_path, big)) == (1.1, [(0.4, 310), (0.4, 250)])


def test_files_that_were_joined_are_read(tmp_path: Path) -> None:
    other = EUROPEAN.replace("1;", "2;")
    trace = read(tmp_path, ("\ufeff" + EUROPEAN + "\ufeff" + other).encode())
    assert [query.query_id for query in trace.queries] == ["1", "2"]


def test_names_in_another_encoding_stay_apart(tmp_path: Path) -> None:
    rows = "".join(PAGE.replace("1,q", f"{name},q").replace("\n1,", f"\n{name},") for name in ("Ä", "Ö"))
    assert len(read(tmp_path, rows.encode("cp1252")).queries) == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("1;question;12,0\n1;chunk;zwölf\n", r"line 2: seconds.*\(columns are separated by ';'\)"),
        ("1;question;12,0\n1;sleep;12,5\n", r"line 2: event.*\(columns are separated by ';'\)"),
        ("1;question;12,0\n1;chunk\n", r"line 2: it is no event.*\(columns are separated by ';'\)"),
        ("1;question;12,0\n1;chunk;1;2\n", r"line 2: .*more than three columns"),
        ("1,question,12,0\n1,chunk,12,4\n", r"line 1: .*more than three columns"),
        ("query;event;seconds\n1;chunk;\n", "line 2: seconds"),
        ("1:question:12\n", "line 1: it is no event"),
    ],
)
def test_a_wrong_row_is_named_with_the_separator_that_was_found(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(tmp_path, content.encode())
