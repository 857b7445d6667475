"""Converts our sampling parameters to vLLM's, and rejects those that a streamed prompt cannot have."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.support.messages import short_repr

if TYPE_CHECKING:
    import vllm
    from vllm.config import VllmConfig
    from vllm.tokenizers import TokenizerLike

RESERVED = {"output_kind", "detokenize"}
"""Sampling parameters of vLLM that would break the stream of the answer's text."""

OF_WHOLE_PROMPTS = (
    "n",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
)
"""Sampling parameters that a stream cannot have, because vLLM or our scheduler needs the whole prompt at once."""

ALMOST_ONE = math.nextafter(1.0, 0.0)
"""A `top_p` that drops no token, since vLLM keeps it in 32 bits, as 1, but with which vLLM does not `apply_top_k_only`.
That dies on a CPU in an engine that verifies drafts: in a step without a draft, it takes the largest of no rows."""


def to_vllm(
    params: SamplingParams, config: "VllmConfig", tokenizer: "TokenizerLike | None" = None
) -> "vllm.SamplingParams":
    """Return the parameters for an engine of this `config`, set to return answers piece by piece. With the engine's
    tokenizer, check the grammar too, which the engine does at the first request that has it.

    :raises ConfigurationError: vLLM refuses the parameters or would crash with them, or `extra` has a reserved name.
    """
    import vllm
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    is_cpu, verifies_drafts = config.device_config.device_type == "cpu", config.speculative_config is not None
    args: dict[str, Any] = {
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": min(params.top_p, ALMOST_ONE) if params.top_k and is_cpu and verifies_drafts else params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
    }
    extra_args = params.extra.get("extra_args") or {}
    if not isinstance(extra_args, Mapping):
        raise ConfigurationError(f"SamplingParams.extra: extra_args={short_repr(extra_args)} must be a mapping")
    if KEY in extra_args:
        raise ConfigurationError(f"SamplingParams.extra: extra_args[{KEY!r}] is reserved for streamrag")
    rewinds = config.scheduler_config.enable_chunked_prefill  # generators, after a part of a prefill; a CPU cannot
    if params.seed is not None and params.temperature > 0 and is_cpu and rewinds:
        raise ConfigurationError(
            f"SamplingParams: seed={params.seed} with temperature={params.temperature:g} would crash vLLM's CPU engine "
            "when it prefills a prompt in several steps. Leave out the seed, or use temperature=0"
        )
    if params.json_schema is not None:
        args["structured_outputs"] = {"json": dict(params.json_schema)}
    if reserved := params.extra.keys() & (args.keys() | RESERVED):
        raise ConfigurationError(f"SamplingParams.extra: {', '.join(sorted(reserved))} cannot be given there")
    args |= params.extra
    if args.get("logprob_token_ids") is not None and verifies_drafts:  # vLLM's rejection sampler does not know them
        raise ConfigurationError(
            f"SamplingParams.extra: logprob_token_ids={short_repr(args['logprob_token_ids'])} would crash an engine "
            "that verifies drafts, once a request has logprobs. Use logprobs, or start the engine without answer_ahead"
        )
    try:
        constraint = args.get("structured_outputs")
        if isinstance(constraint, Mapping):
            args["structured_outputs"] = StructuredOutputsParams(**constraint)
        elif not isinstance(constraint, StructuredOutputsParams | None):
            raise ValueError("structured_outputs must be a mapping, such as {'regex': PATTERN}")
        converted = vllm.SamplingParams(**args, output_kind=RequestOutputKind.DELTA)
        converted.verify(config.model_config, config.speculative_config, None, None)
        if tokenizer is not None:
            copy = converted.clone()  # vLLM writes into the grammar's parameters, which may be the caller's
            copy.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
        return converted
    except (TypeError, ValueError, VLLMClientError) as error:
        raise ConfigurationError(f"vLLM refuses these SamplingParams: {error}") from error


def for_stream(params: "vllm.SamplingParams", *, has_grammar: bool = False) -> "vllm.SamplingParams":
    """Return a copy for a streamed prompt: cumulative tokens without text or stop texts, which `AnswerText` handles.

    has_grammar: whether to keep `structured_outputs`, whose grammar vLLM compiles for each message that has it;
        otherwise the copy has none.

    :raises ConfigurationError: `params` contain parameters that a streamed prompt cannot have.
    """
    from vllm.sampling_params import RequestOutputKind

    default: Any = type(params)()
    if unsupported := [name for name in OF_WHOLE_PROMPTS if _is_given(getattr(params, name), getattr(default, name))]:
        raise ConfigurationError(
            f"SamplingParams: {', '.join(unsupported)} cannot be used with a streamed prompt. "
            'Leave that out, or start the engine with VllmBackend(strategy="warming"). A pipeline takes n and '
            "prompt_logprobs with either strategy"
        )
    copy = params.clone()
    copy.stop = []
    if not has_grammar:
        copy.structured_outputs = None
    # Not DELTA: vLLM would merge the finish of a chunk with the first tokens, and repeat their log-probabilities.
    copy.output_kind = RequestOutputKind.CUMULATIVE
    copy.detokenize = False
    return copy


def _is_given(value: Any, default: Any) -> bool:
    """Whether a parameter differs from its default. Arrays, which have no truth value, are only compared to None."""
    return value is not None if default is None else bool(value != default)
