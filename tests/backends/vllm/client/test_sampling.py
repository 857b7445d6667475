"""Sampling parameters that vLLM would refuse only once the request is with its engine."""

from typing import Any

import pytest

pytest.importorskip("vllm")

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
