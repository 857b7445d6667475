"""Sampling parameters that vLLM would refuse only once the request is with its engine."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only, apply_top_k_top_p_pytorch

from streamrag.backends.vllm.client.sampling import ALMOST_ONE, to_vllm
from streamrag.backends.vllm.scheduler_options import draft_config
from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from tests.backends.vllm.client.fake_engine import make_client


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {1 << 20: 1.0}), ("stop_token_ids", [1 << 20]), ("logprobs", 10_000)]
)
def test_parameters_that_do_not_fit_the_model_are_refused_when_they_are_made(name: str, value: Any) -> None:
    config = make_client(None, 100).vllm_config
    assert to_vllm(SamplingParams(extra={"logit_bias": {5: 1.0}}), config).logit_bias == {5: 1.0}
    with pytest.raises(ConfigurationError, match=name):
        to_vllm(SamplingParams(extra={name: value}), config)


@pytest.mark.parametrize("constraint", [{"json": {"type": "no such type"}}, {"regex": "("}, {"choice": []}])
def test_a_constraint_without_a_grammar_is_refused_only_with_a_tokenizer(constraint: dict[str, Any]) -> None:
    client = make_client(None, 100)
    params = SamplingParams(extra={"structured_outputs": constraint})
    to_vllm(params, client.vllm_config)
    with pytest.raises(ConfigurationError, match="vLLM refuses these SamplingParams"):
        to_vllm(params, client.vllm_config, client.tokenizer)


def test_the_check_of_a_grammar_leaves_the_constraint_of_its_caller_as_it_was() -> None:
    client, constraint = make_client(None, 100), StructuredOutputsParams(choice=["yes", "no"])
    to_vllm(SamplingParams(extra={"structured_outputs": constraint}), client.vllm_config, client.tokenizer)
    assert constraint == StructuredOutputsParams(choice=["yes", "no"])


@pytest.fixture
def drafting_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    config = make_client(None, 100).vllm_config
    monkeypatch.setattr(config, "speculative_config", draft_config(4))
    return config


def test_top_k_alone_gets_a_top_p_only_where_the_engine_would_die_of_it(drafting_config: Any) -> None:
    def top_p(config: Any, **values: Any) -> float:
        return float(to_vllm(SamplingParams(temperature=1.0, **values), config).top_p)

    assert top_p(drafting_config, top_k=5) == ALMOST_ONE < 1
    assert top_p(drafting_config, top_k=5, top_p=0.9) == 0.9
    assert top_p(drafting_config) == 1
    assert to_vllm(SamplingParams(top_k=5), drafting_config).top_p == 1, "it is greedy"
    drafting_config.speculative_config = None
    assert top_p(drafting_config, top_k=5) == 1
    drafting_config.speculative_config = draft_config(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_config.device_config, "device_type", "cuda")
        assert top_p(drafting_config, top_k=5) == 1


def test_the_top_p_that_top_k_gets_leaves_every_probability_as_it_is() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1_000) * torch.logspace(-2, 3, 64).unsqueeze(1)  # also some of which most underflow
    logits[::4] = logits[::4].round()  # with ties
    top_k = torch.tensor([1, 2, 7, 50, 999, 1_000, 3, 20], dtype=torch.int32).repeat(8)
    top_p = torch.full((64,), ALMOST_ONE, dtype=torch.float32)  # as vLLM stores it
    expected = apply_top_k_only(logits.clone(), top_k.clone()).softmax(-1)
    assert torch.equal(apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p).softmax(-1), expected)
    nothing = apply_top_k_top_p_pytorch(logits[:0].clone(), top_k[:0], top_p[:0], allow_cpu_sync=True)
    assert nothing.shape == (0, 1_000)


def test_tokens_to_report_the_log_probabilities_of_are_refused_by_an_engine_that_verifies_drafts(
    drafting_config: Any,
) -> None:
    params = SamplingParams(extra={"logprob_token_ids": [5, 6]})
    with pytest.raises(ConfigurationError, match=r"logprob_token_ids=\[5, 6\] would crash.*without answer_ahead"):
        to_vllm(params, drafting_config)
    with pytest.raises(ConfigurationError, match=r"logprob_token_ids=\[\] would crash"):
        to_vllm(SamplingParams(extra={"logprob_token_ids": []}), drafting_config)
    drafting_config.speculative_config = None
    assert to_vllm(params, drafting_config).logprob_token_ids == [5, 6]
