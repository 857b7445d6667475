"""Our sampling parameters as vLLM's, and what of them a streamed prompt cannot have."""

from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError

if TYPE_CHECKING:
    import vllm
    from vllm.config import VllmConfig

RESERVED = {"n", "output_kind", "detokenize"}
"""Sampling parameters of vLLM that would break the stream of one answer's text."""

OF_WHOLE_PROMPTS = (
    "structured_outputs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
)
"""Sampling parameters that need a prompt in one piece, in vLLM or in its scheduler extended by ours."""


def to_vllm(params: SamplingParams, config: "VllmConfig") -> "vllm.SamplingParams":
    """Return the parameters for an engine of this `config`; answers come in pieces.

    :raises ConfigurationError: for what vLLM refuses, or would die of.
    """
    import vllm
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    named = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
    }
    if taken := params.extra.keys() & (named.keys() | RESERVED):
        raise ConfigurationError(f"SamplingParams.extra: {', '.join(sorted(taken))} cannot be given there")
    if KEY in (params.extra.get("extra_args") or {}):
        raise ConfigurationError(f"SamplingParams.extra: extra_args[{KEY!r}] is taken by streamrag itself")
    if params.seed is not None and params.temperature > 0 and _dies_of_seeds(config):
        raise ConfigurationError(
            f"SamplingParams: seed={params.seed} with temperature={params.temperature:g} would end vLLM's CPU engine "
            "when it prefills a prompt in several steps. Leave out the seed, or use temperature=0"
        )
    try:
        made = vllm.SamplingParams(**named, **params.extra, output_kind=RequestOutputKind.DELTA)
        made.verify(config.model_config, config.speculative_config, None, None)  # the rest is for the engine to see
        return made
    except (TypeError, ValueError, VLLMClientError) as error:
        raise ConfigurationError(f"vLLM refuses these SamplingParams: {error}") from error


def _dies_of_seeds(config: "VllmConfig") -> bool:
    """vLLM 0.32 rewinds a request's generator after each step that leaves its prefill unfinished; on CPU it cannot."""
    return bool(config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill)


def for_stream(params: "vllm.SamplingParams") -> "vllm.SamplingParams":
    """Return a copy with which vLLM streams tokens: their text, and so stop texts, are the business of `AnswerText`.

    :raises ConfigurationError: `params` have what a streamed prompt cannot have.
    """
    from vllm.sampling_params import RequestOutputKind

    default: Any = type(params)()
    if found := [name for name in OF_WHOLE_PROMPTS if _is_given(getattr(params, name), getattr(default, name))]:
        raise ConfigurationError(
            f"SamplingParams: {', '.join(found)} cannot be used with a streamed prompt. "
            'Leave that out, or start the engine with VllmBackend(strategy="warming")'
        )
    copy = params.clone()
    copy.stop = []
    # Not DELTA: there vLLM merges what ends a chunk with the first tokens, and repeats their log-probabilities.
    copy.output_kind = RequestOutputKind.CUMULATIVE
    copy.detokenize = False
    return copy


def _is_given(value: Any, default: Any) -> bool:
    """Whether a parameter was given. Arrays, which have no truth, are only compared with None."""
    return value is not None if default is None else bool(value != default)
