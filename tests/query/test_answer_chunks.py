"""The chunks of answers, joined: what the answers of queries, sessions and conversations have in common."""

from collections.abc import Iterator

from streamrag import Answer, AnswerChunk
from streamrag.core import TokenUsage
from streamrag.query.answer_chunks import AnswerChunks
from streamrag.testing import ScriptedBackend


def chunks_of(*given: AnswerChunk, times_s: Iterator[float]) -> AnswerChunks:
    chunks = AnswerChunks(ScriptedBackend().model, lambda: next(times_s))
    for chunk in given:
        chunks.add(chunk)
    return chunks


def joined(chunks: AnswerChunks) -> Answer:
    return chunks.join(num_prompt_tokens=7, retrieval_s=1.0, submitted_s=0.0)


def test_the_first_token_is_that_of_the_first_chunk_with_a_token_or_text() -> None:
    given = AnswerChunk("", ()), AnswerChunk("", (1,)), AnswerChunk("a", (2,), "stop")
    answer = joined(chunks_of(*given, times_s=iter([2.0, 3.0, 4.0, 5.0])))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a", (1, 2), "stop")
    assert (answer.timings.ttft_s, answer.timings.ttft_after_retrieval_s, answer.timings.total_s) == (3.0, 2.0, 5.0)
    assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens) == (7, 2)


def test_an_answer_without_a_token_has_its_end_for_the_first_one() -> None:
    answer = joined(chunks_of(AnswerChunk("", (), "stop"), times_s=iter([2.0, 3.0])))
    assert (answer.text, answer.timings.ttft_s) == ("", 3.0)


def test_answers_interleave_and_only_finished_ones_count() -> None:
    given = [AnswerChunk("a", (1,), index=1), AnswerChunk("b", (2,)), AnswerChunk("c", (3,), "length", index=1)]
    times_s = iter(map(float, range(9)))
    assert chunks_of(*given, times_s=times_s).finished().keys() == {1}
    answer = joined(chunks_of(*given, AnswerChunk("", (), "stop", usage=TokenUsage(9, 4)), times_s=times_s))
    assert (answer.text, [each.text for each in answer.alternatives]) == ("b", ["ac"])
    assert answer.usage == TokenUsage(9, 4)
