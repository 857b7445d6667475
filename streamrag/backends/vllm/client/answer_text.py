"""The text of a streamed prompt's answer, made from its tokens by vLLM's own detokenizer.

For streamed prompts vLLM refuses stop texts, and when it begins to make text it knows only the prompt's first chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrag.errors import ConfigurationError

if TYPE_CHECKING:
    import vllm


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text that new tokens add to an answer."""

    text: str
    """May be empty: a character is incomplete, or what follows may make it the beginning of a stop text."""
    num_tokens: int
    """Number of new tokens that belong to the answer: those behind the end of a stop text do not."""
    has_stop_text: bool
    """Whether the answer ends here because a stop text was found."""


class AnswerText:
    """Exactly the text, and the end, that vLLM gives to the answer when it is sent the complete prompt at once."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: "vllm.SamplingParams") -> None:
        """`tokenizer` is vLLM's; None, for an engine without one, gives no text.

        :raises ConfigurationError: `params` have stop texts, and there is no tokenizer.
        """
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if params.stop and tokenizer is None:
            raise ConfigurationError(
                f"SamplingParams: stop={params.stop} needs text, but the engine was started with skip_tokenizer_init"
            )
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=list(prompt_token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def add(self, token_ids: Sequence[int], finish_reason: str | None) -> TextPiece:
        """Return the text of these new tokens, with which the engine finished for this reason, or did not."""
        num_tokens, stop_text = len(token_ids), None
        for number, token_id in enumerate(token_ids, start=1):  # one by one, as vLLM gets them
            is_stop_token = finish_reason == "stop" and number == num_tokens
            stop_text = self._detokenizer.update([token_id], is_stop_token)
            if stop_text:
                num_tokens = number
                break
        is_last = bool(stop_text) or finish_reason is not None
        text = self._detokenizer.get_next_output_text(finished=is_last, delta=True)
        return TextPiece(text, num_tokens, bool(stop_text))
