"""Sampling parameters that vLLM would refuse only once the request is with its engine."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams

from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from tests.backends.vllm.client.fake_engine import make_client


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {1 << 20: 1.0}), ("stop_token_ids", [1 << 20]), ("logprobs", 10_000)]
)
def test_what_does_not_fit_the_model_is_refused_when_parameters_are_made(name: str, value: Any) -> None:
    config = make_client(None, 100).vllm_config
    assert to_vllm(SamplingParams(extra={"logit_bias": {5: 1.0}}), config).logit_bias == {5: 1.0}
    with pytest.raises(ConfigurationError, match=name):
        to_vllm(SamplingParams(extra={name: value}), config)


@pytest.mark.parametrize("constraint", [{"json": {"type": "no such type"}}, {"regex": "("}, {"choice": []}])
def test_what_no_grammar_can_be_made_of_is_refused_with_the_tokenizer_only(constraint: dict[str, Any]) -> None:
    client = make_client(None, 100)
    params = SamplingParams(extra={"structured_outputs": constraint})
    to_vllm(params, client.vllm_config)
    with pytest.raises(ConfigurationError, match="vLLM refuses these SamplingParams"):
        to_vllm(params, client.vllm_config, client.tokenizer)


def test_the_check_of_a_grammar_leaves_the_constraint_of_its_caller_as_it_was() -> None:
    client, constraint = make_client(None, 100), StructuredOutputsParams(choice=["yes", "no"])
    to_vllm(SamplingParams(extra={"structured_outputs": constraint}), client.vllm_config, client.tokenizer)
    assert constraint == StructuredOutputsParams(choice=["yes", "no"])
