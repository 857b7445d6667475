"""The text of a streamed prompt's answer, decoded by vLLM's own detokenizer.

For streamed prompts vLLM refuses stop texts, and its detokenizer knows only the prompt's first chunk.
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

    text: str  # empty while a character is incomplete, or while the text may be the beginning of a stop text
    num_tokens: int  # number of new tokens that belong to the answer: tokens after a stop text do not
    has_stop_text: bool  # whether a stop text ends the answer here


class AnswerText:
    """Decodes an answer to the same text and end as vLLM would, had it been sent the complete prompt at once."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: "vllm.SamplingParams") -> None:
        """Start with an empty answer. `tokenizer` is vLLM's; with None, for an engine without one, there is no text.

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
        """Return the text of new tokens up to a stop text, the number of tokens up to there, and whether there was one.
        Hold back text that may begin a stop text. `finish_reason` is the engine's, or None before the end."""
        num_tokens, stop_text = len(token_ids), None
        for number, token_id in enumerate(token_ids, start=1):  # one at a time, as in vLLM
            is_stop_token = finish_reason == "stop" and number == num_tokens
            stop_text = self._detokenizer.update([token_id], is_stop_token)
            if stop_text:
                num_tokens = number
                break
        is_last = bool(stop_text) or finish_reason is not None
        text = self._detokenizer.get_next_output_text(finished=is_last, delta=True)
        return TextPiece(text, num_tokens, bool(stop_text))
