import csv
import json
from pathlib import Path

import pytest

from streamrag.errors import TraceError
from streamrag.trace.read import read_trace
from streamrag.trace.values import TracedAppend, TracedUpdate
from studies.public_traces.run import main
from studies.public_traces.stream2llm import read_stream2llm_anns, read_stream2llm_crawler

COLUMNS = ("type", "query", "content", "startTime", "endTime")


def count_words(text: str) -> int:
    return len(text.split())


def write_csv(path: Path, *rows: tuple[object, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def write_crawl(folder: Path, number: int, *rows: tuple[object, ...]) -> Path:
    return write_csv(folder / f"query_{number}.csv", COLUMNS, *rows)


def test_a_crawl_is_read_in_the_order_in_which_pages_ended(tmp_path: Path) -> None:
    write_crawl(
        tmp_path,
        10,
        ("tavily_search", "Who?", "", 0.0, 1.5),
        ("page_scrape", "", "late page, with a\nline break", 1.5, 4.25),
        ("page_scrape", "", "early page", 1.5, 2.0),
        ("page_scrape", "", "", 1.5, 3.0),
    )
    write_crawl(tmp_path, 9, ("tavily_search", "What?", "", 100.0, 101.0), ("page_scrape", "What?", "a", 101.0, 102.5))
    trace = read_stream2llm_crawler(tmp_path, count_tokens=count_words, tokenizer="words")
    assert [query.text for query in trace.queries] == ["What?", "Who?"]  # by number
    assert trace.queries[0].events[0].at_s == 2.5  # from the first start
    query = trace.queries[1]
    assert query.query_id == "query_10"
    assert query.end_s == 4.25
    assert [event.at_s for event in query.events] == [2.0, 4.25]
    first = query.events[0]
    assert isinstance(first, TracedAppend)
    assert (first.chunk.text, first.chunk.num_tokens) == ("early page", 2)
    assert [(skip.at_s, skip.reason) for skip in query.skipped] == [(3.0, "no content")]
    assert trace.provenance["tokenizer"] == "words"


def test_queries_without_pages_are_left_out_and_counted(tmp_path: Path) -> None:
    write_csv(tmp_path / "query_1.csv", ("type", "query", "startTime", "endTime"), ("tavily_search", "Who?", 0, 1))
    write_crawl(tmp_path, 2, ("tavily_search", "Who?", "", 0, 1), ("page_scrape", "", "a", 1, 2))
    trace = read_stream2llm_crawler(tmp_path, count_tokens=count_words)
    assert len(trace.queries) == 1
    assert trace.provenance["num_left_out"] == 1


def test_pages_of_any_size_are_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    write_crawl(tmp_path, 1, ("tavily_search", "Who?", "", 0, 1), ("page_scrape", "", "word " * 1_000_000, 1, 2))
    trace = read_stream2llm_crawler(tmp_path, count_tokens=count_words)
    event = trace.queries[0].events[0]
    assert isinstance(event, TracedAppend)
    assert event.chunk.num_tokens == 1_000_000
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("page_scrape", "", "a\nb", "soon", 2), "line 3: startTime='soon' must be seconds"),
        (("page_scrape", "", "a", 1, "nan"), "line 3: endTime='nan' must be seconds"),
        (("page_scrape", "", "a", 3, 2), "line 3: endTime=2.0 is before startTime=3.0"),
        (("pdf", "", "a", 1, 2), "line 3: type='pdf' must be tavily_search or page_scrape"),
        (("page_scrape", "", "a", 1), "line 3: 4 fields, and 5 columns"),
    ],
)
def test_a_broken_row_of_a_crawl_is_named(row: tuple[object, ...], message: str, tmp_path: Path) -> None:
    path = write_crawl(tmp_path, 1, ("tavily_search", "Who?", "", 0, 1), row)
    with pytest.raises(TraceError) as raised:
        read_stream2llm_crawler(tmp_path, count_tokens=count_words)
    assert str(raised.value) == f"{path}, {message}"


def test_a_row_is_named_by_the_line_it_begins_on(tmp_path: Path) -> None:
    path = write_crawl(tmp_path, 1, ("tavily_search", "Who?", "", 0, 1), ("page_scrape", "", "a\nb\nc", 1, 2), ("x",))
    with pytest.raises(TraceError) as raised:
        read_stream2llm_crawler(tmp_path, count_tokens=count_words)
    assert str(raised.value) == f"{path}, line 6: 1 fields, and 5 columns"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type,query\na,b\n", "line 1: no column startTime, endTime; it has type, query"),
        ("", " is empty"),
        ('type,query,startTime,endTime\npage_scrape,"open', "line 2: unexpected end of data"),
    ],
)
def test_a_file_of_another_shape_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "query_1.csv").write_text(text)
    with pytest.raises(TraceError) as raised:
        read_stream2llm_crawler(tmp_path, count_tokens=count_words)
    assert message in str(raised.value)


def test_a_folder_without_crawls_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no query_\*\.csv"):
        read_stream2llm_crawler(tmp_path, count_tokens=count_words)


# ---------------------------------------------------------------------------------------------------------------- ANNS


def write_anns(folder: Path, *rows: tuple[object, ...]) -> Path:
    write_csv(folder / "res" / "trace_0.csv", ("StartTime_us", "EndTime_us", "PipelinePool"), *rows)
    for number, part in enumerate(({"11": "eleven words", "12": "twelve"}, {"13": "thirteen is the last"})):
        (folder / f"retrieved_corpus_content.part.{number}.json").write_text(json.dumps(part))
    query_map = folder / "query_trace_map_5k.json"
    query_map.write_text(json.dumps({"0": {"query": "Who?", "trace_file": "trace_0.csv"}}))
    return query_map


def test_a_vector_search_is_read_with_each_pool_at_the_end_of_its_window(tmp_path: Path) -> None:
    rows = ((0, 2_000_000, "(11,12)"), (2_000_000, 2_500_000, "(13, 11)"), (2_600_000, 2_700_000, "()"))
    trace = read_stream2llm_anns(write_anns(tmp_path, *rows), count_tokens=count_words)
    (query,) = trace.queries
    assert (query.query_id, query.text, query.end_s) == ("0", "Who?", 2.6)
    assert [event.at_s for event in query.events] == [2.0, 2.5, 2.6]
    pools = [event.chunks for event in query.events if isinstance(event, TracedUpdate)]
    assert [[chunk.uri for chunk in pool] for pool in pools] == [["11", "12"], ["13", "11"], []]
    assert [chunk.num_tokens for chunk in pools[1]] == [4, 2]
    assert pools[0][0] == pools[1][1]


def test_documents_that_the_corpus_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = read_stream2llm_anns(write_anns(tmp_path, (0, 1, "(99,11)")), count_tokens=count_words)
    event = trace.queries[0].events[0]
    assert isinstance(event, TracedUpdate)
    assert [chunk.uri for chunk in event.chunks] == ["11"]
    assert trace.provenance["num_documents_missing"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 1, "(a,b)"), "line 2: PipelinePool='(a,b)' must be ids, as in (12,34)"),
        ((0, "", "(11)"), "line 2: EndTime_us='' must be microseconds"),
        ((5, 1, "(11)"), "line 2: EndTime_us is before StartTime_us"),
    ],
)
def test_a_broken_row_of_a_search_is_named(row: tuple[object, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as raised:
        read_stream2llm_anns(write_anns(tmp_path, row), count_tokens=count_words)
    assert str(raised.value) == f"{tmp_path / 'res' / 'trace_0.csv'}, {message}"


def test_missing_and_broken_parts_of_a_search_are_named(tmp_path: Path) -> None:
    query_map = write_anns(tmp_path, (0, 1, "(11)"))
    with pytest.raises(TraceError, match=r"has no retrieved_corpus_content\.part"):
        read_stream2llm_anns(query_map, count_tokens=count_words, corpus_dir=tmp_path / "res")
    (tmp_path / "retrieved_corpus_content.part.1.json").write_text('{"1": 2}')
    with pytest.raises(TraceError, match=r"part\.1\.json: document '1' must be a text"):
        read_stream2llm_anns(query_map, count_tokens=count_words)
    query_map.write_text('{"0": {"query": "Who?", "trace_file": "none.csv"}}')
    with pytest.raises(TraceError, match=r"none\.csv cannot be read: No such file"):
        read_stream2llm_anns(query_map, count_tokens=count_words)
    query_map.write_text('{"0": {"query": "Who?"}}')
    with pytest.raises(TraceError, match="query '0' must have the texts"):
        read_stream2llm_anns(query_map, count_tokens=count_words)
    query_map.write_text("{\n]")
    with pytest.raises(TraceError, match=r"is not JSON: .*line 2"):
        read_stream2llm_anns(query_map, count_tokens=count_words)


def test_a_crawl_of_others_is_converted_with_its_texts_counted(tmp_path: Path) -> None:
    (tmp_path / "query_0.csv").write_text(
        "type,query,content,startTime,endTime\ntavily_search,Who?,,0,1\npage_scrape,,three small words,1,2\n"
    )
    output = tmp_path / "trace.jsonl"
    assert main(["stream2llm-crawler", str(tmp_path), "--output", str(output)]) == 0
    event = read_trace(output).queries[0].events[0]
    assert isinstance(event, TracedAppend)
    assert event.chunk.num_tokens == 3
