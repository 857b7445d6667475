import json

import pytest

from studies.routing.loads import LOADS, Piece, blocks, mooncake, rag


def test_equal_pieces_are_equal_blocks_and_others_share_none():
    one, other = blocks((Piece(1, 128), Piece(2, 65))), blocks((Piece(1, 128), Piece(3, 64)))
    assert len(one) == 4, "pieces are whole blocks"
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_in_order_of_arrival_at_its_rate_and_the_same_for_the_same_seed(name):
    queries = LOADS[name](5.0, 600, 1)
    assert queries == LOADS[name](5.0, 600, 1) != LOADS[name](5.0, 600, 2)
    assert len(queries) == 600
    times = [query.arrival_s for query in queries]
    assert times == sorted(times)
    assert all(query.num_output >= 2 and query.num_blocks for query in queries)
    assert 600 / times[-1] == pytest.approx(5.0, rel=0.4)


def test_documents_stream_in_and_each_prompt_has_the_documents_of_the_one_before():
    for query in rag(1.0, 50, 1):
        assert [at_s for at_s, _ in query.texts] == sorted(at_s for at_s, _ in query.texts)
        for (_, before), (_, after) in zip(query.texts, query.texts[1:], strict=False):
            assert before[:-1] == after[: len(before) - 1]
            assert before[-1] == after[-1], "the question stays behind them"


def test_a_file_of_mooncake_s_is_sped_up_to_the_rate(tmp_path):
    rows = [
        {"timestamp": 1_000 * n, "input_length": 1_100, "output_length": 7, "hash_ids": [0, 1, 9 + n]}
        for n in range(11)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, *_, last = mooncake(2.0, 11, 1, path)
    assert (first.arrival_s, last.arrival_s, first.num_output) == (0.0, pytest.approx(5.5), 7)
    one, other = blocks(first.texts[0][1]), blocks(last.texts[0][1])
    assert one[:16] == other[:16], "two blocks of 512 tokens"
    assert len(one) == 18
    assert one[16:] != other[16:]


def test_a_file_of_azure_s_has_its_lengths(tmp_path):
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.6805900,640,109"]
    path.write_text("\n".join(lines))
    first, last = LOADS["azure"](1.0, 2, 1, path)
    assert (first.num_output, last.num_output) == (44, 109)
    assert last.arrival_s == pytest.approx(2.0)
    assert last.num_blocks == 2 + 10, "behind a system prompt of two blocks"
