"""The tokens of an engine that computes nothing."""

from collections.abc import Callable, Sequence

import pytest
from vllm.sampling_params import SamplingParams

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import PromptMessage

SHAPE = EngineShape(num_blocks=100, max_model_len=1_000, num_draft_tokens=8)
ANSWER = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7]


def answer(draft: Sequence[int], token_at: Callable[[str, int], int] | None) -> tuple[list[int], int]:
    """The tokens of an answer with this draft, and the steps that it took."""
    engine = SimulatedEngine(SHAPE, BlindRunner(token_at=token_at), always(1.0))
    params = SamplingParams(max_tokens=len(ANSWER), temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add("q", range(40, 90), params, PromptMessage(0, 0, is_complete=True, draft=list(draft)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    return tokens, int(engine.now_s)


@pytest.mark.parametrize(
    ("draft", "num_steps"),
    [
        ([], 12),
        (ANSWER, 3),  # the first token, then 8 of the draft and one more, then the rest
        ([*ANSWER[:5], 77, *ANSWER[6:]], 6),  # 4 of the draft and the right token; two more until it is found again
        ([77] * 12, 12),
    ],
)
def test_the_tokens_of_a_draft_are_accepted_up_to_the_first_wrong_one(draft: list[int], num_steps: int) -> None:
    assert answer(draft, lambda request_id, position: ANSWER[position]) == (ANSWER, num_steps)


def test_an_engine_that_always_samples_the_same_token_accepts_only_that_one() -> None:
    assert answer([1, 1, 1, 0, 1], None) == ([1] * 12, 10)
