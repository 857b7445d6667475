"""What counts as a right answer, and what is said of the time that answers take."""

from studies.demo_model.run import Row, has_words, seconds


def test_words_are_whole_words() -> None:
    assert has_words("Pictures need the extra `plot`.", ("plot",))
    assert not has_words("The report needs matplotlib.", ("plot",))
    assert has_words("Both **http** and https are.", ("http", "https"))
    assert not has_words("Only https is.", ("http", "https"))
    assert has_words("It may take 4 s.", ("4 s",))


def test_seconds_are_those_of_prompts_and_of_tokens_after_the_first() -> None:
    rows = [
        Row("?", False, True, True, True, "", tuple(range(11)), 100, ttft_after_retrieval_s=0.5, decode_s=1.0),
        Row("?", True, True, True, True, "", tuple(range(31)), 200, ttft_after_retrieval_s=0.7, decode_s=1.0),
    ]
    assert seconds(rows) == {"num_prompt_tokens": 150, "ttft_after_retrieval_s": 0.6, "tokens_per_s": 20.0}
