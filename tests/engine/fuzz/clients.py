"""What the clients of a run know: what they have sent, and what they must and must not be sent for it.

This is the truth that the scheduler is held to. Nothing here is read from the scheduler.
"""

from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput, FinishReason

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.records import RequestRecord
from tests.engine.oracle import fingerprint, next_token

from .events import Chunk, Plain
from .prompt_logprobs import expected_logprobs

__all__ = ["VOCABULARY", "Client", "FuzzError", "check"]

VOCABULARY = 50


class FuzzError(AssertionError):
    """Something that must never be."""


def check(condition: object, message: str) -> None:
    if not condition:
        raise FuzzError(message)


@dataclass
class Client:
    """What a client sees of its request, checked as it comes."""

    name: str
    request_id: str
    """That of an earlier request, perhaps."""
    max_model_len: int
    vocabulary: int = VOCABULARY
    """How many tokens the model knows."""
    prefill_unit: int = 1
    """Of how many tokens a multiple is computed while its prompt is partial."""
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0
    stop: int | None = None
    is_complete: bool = False
    """Whether it has sent its whole prompt."""
    has_draft: bool = False
    """Whether it has sent a draft of its answer as well."""
    num_acknowledged: int = 0
    tokens: list[int] = field(default_factory=list)
    ending: FinishReason | None = None
    sent: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When, and which prompt. What was lost on the way is not among them."""
    record: RequestRecord | None = None

    wants_logprobs: bool = False
    """Whether it wants the log-probabilities of its prompt."""
    logprobs: tuple[int, ...] | None = None
    """Those that it was sent."""
    must_fail: bool = False
    """Whether it has sent what must be refused."""
    may_fail: bool = False
    """Whether a load of its KV has failed, which ends requests under the connector's policy."""
    lacks_start: bool = False
    """Whether its first chunk was lost."""
    is_gapped: bool = False
    """Whether the next chunk follows one that was lost."""
    is_aborted: bool = False
    """By itself, or by a pause."""

    lacks_memory: bool = False
    """Whether it was told that its last chunk cannot be computed for the time being."""
    grammar: "AcceptedTokens | None" = None
    ready_at: int | None = None
    """The number of steps, when its grammar was ready."""
    sent_at: int = 0
    """The number of steps, when it sent its prompt."""
    started_at: int | None = None
    """The number of steps, when it was first computed."""
    """The number of steps, when it was aborted."""
    computed: tuple[int, float] = (0, 0.0)
    """How many chunks it had sent when it was last computed, and when that ended."""
    counts: tuple[int, int] = (0, 0)
    """Prompt tokens that the runner has computed for it, and those of prefixes that it had before."""

    @property
    def num_chunks(self) -> int:
        return len(self.sent)

    @property
    def is_stream(self) -> bool:
        return self.name.startswith("s")

    @property
    def is_too_long(self) -> bool:
        return any(len(prompt) >= self.max_model_len for _, prompt in self.sent)

    @property
    def is_waiting(self) -> bool:
        """Whether there is more to come for it, sooner or later."""
        return bool(self.sent) and not self.is_aborted and self.ending is None

    # ------------------------------------------------------------------------------------------------ what it sends

    def send(self, event: Plain | Chunk, now_s: float) -> None:
        tail = event.prompt[event.num_kept :] if isinstance(event, Chunk) else event.prompt
        self.must_fail |= self.is_gapped
        if self.is_gapped and not self.sent:
            self.lacks_start = True
            self.sent.append((now_s, tail))
        if self.must_fail:
            return  # it will not be taken
        self.sent.append((now_s, event.prompt))
        self.prompt, self.max_tokens, self.stop = event.prompt, event.max_tokens, event.stop
        self.is_complete = isinstance(event, Plain) or event.is_complete
        self.has_draft = isinstance(event, Chunk) and bool(event.draft)

    def end_input(self) -> bool:
        """Whether it gives up, without a last chunk."""
        gives_up = self.is_waiting and not (self.is_complete or self.must_fail or self.is_too_long)
        self.must_fail |= gives_up
        return gives_up

    # --------------------------------------------------------------------------------------------- what it is sent

    def receive(self, output: EngineCoreOutput, now_s: float) -> None:
        name = self.name
        if self.is_aborted:
            return
        check(self.is_waiting, f"{name}: output after its end: {output}")
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        if "chunk" in ours:
            self._is_acknowledged(ours["chunk"], ours["num_computed"], now_s, lacks_memory="is_waiting" in ours)
            return
        if output.finish_reason == FinishReason.ERROR:
            lost_logprobs = self.wants_logprobs and "log-prob" in ours.get("error", "")
            is_known = self.must_fail or self.is_too_long or self.may_fail or lost_logprobs
            check(is_known, f"{name}: failed for no reason: {ours}")
            check("error" in ours or self.grammar or self.may_fail, f"{name}: error without a reason")
            self.ending = output.finish_reason
            self.record = RequestRecord.from_dict(ours["record"]) if ours else None
            return
        check(self.is_complete and not self.must_fail, f"{name}: a token of a partial prompt: {output}")
        check(self.grammar is None or self.ready_at is not None, f"{name}: a token before its grammar was ready")
        if self.is_stream:
            check(self.num_acknowledged == self.num_chunks - 1, f"{name}: token before all acknowledgements")
        self.tokens += output.new_token_ids
        if output.new_prompt_logprobs_tensors is not None:
            check(self.wants_logprobs and self.logprobs is None, f"{name}: log-probabilities again, or not wanted")
            self.logprobs = tuple(output.new_prompt_logprobs_tensors)  # type: ignore[arg-type]
        self.ending = output.finish_reason
        check(("record" in ours) == (self.ending is not None), f"{name}: a record before the end, or none: {ours}")
        if self.ending is not None:
            self.record = RequestRecord.from_dict(ours["record"])

    def _is_acknowledged(self, index: int, num_computed: int, now_s: float, *, lacks_memory: bool) -> None:
        name = self.name
        check(index == self.num_acknowledged, f"{name}: {index} acknowledged out of turn")
        check(not self.tokens, f"{name}: acknowledgement after the first token")
        check(self.is_stream and index < self.num_chunks - self.is_complete, f"{name}: acknowledged too much")
        self.num_acknowledged += 1
        self.lacks_memory = lacks_memory
        num_computable = (len(self.sent[index][1]) - 1) // self.prefill_unit * self.prefill_unit
        if index < self.num_chunks - 1 or self.must_fail or lacks_memory:
            # It was superseded, perhaps, or is not computed for the time being.
            check(0 <= num_computed <= num_computable, f"{name}: {num_computed} computed of {num_computable}")
            return
        check(
            num_computed == num_computable, f"{name}: acknowledged when {num_computed} of {num_computable} were there"
        )
        num_chunks, until_s = self.computed
        check(num_chunks < self.num_chunks or until_s <= now_s, f"{name}: acknowledged while still computing")

    def check_answer(self) -> None:
        """That the tokens are those of a fresh request."""
        prefix = 0
        for token in self.prompt:
            prefix = fingerprint(prefix, token)
        expected: list[int] = []
        room = min(self.max_tokens, self.max_model_len - len(self.prompt))
        while len(expected) < room and (not expected or expected[-1] != self.stop):
            expected.append(next_token(prefix, self.vocabulary))
            prefix = fingerprint(prefix, expected[-1])
        check(self.tokens == expected, f"{self.name}: answered {self.tokens}, expected {expected}")
        if self.wants_logprobs:
            is_right = self.logprobs == expected_logprobs(self.prompt)
            check(is_right, f"{self.name}: log-probabilities of its prompt are lost or wrong: {self.logprobs}")
        if self.grammar is not None:
            check(self.grammar.tokens == expected, f"{self.name}: its grammar has seen {self.grammar.tokens}")


class AcceptedTokens:
    """Stands for a grammar that allows everything. vLLM must show it each token of the answer, once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.tokens += tokens
        return True
