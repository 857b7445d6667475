"""What the record of a request must say, found out from its client and from the runner, not from the scheduler."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from vllm.v1.engine import FinishReason

from streamrag.records import RequestRecord
from tests.engine.oracle import OracleRunner, V1OracleRunner, V2OracleRunner

from .clients import Client

__all__ = ["CountingV1Runner", "CountingV2Runner", "problems"]


class Counting(OracleRunner):
    """Counts the prompt tokens that it computes per request, and those of prefixes that the request had before."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.num_computed: Counter[str] = Counter()
        self.num_recomputed: Counter[str] = Counter()
        self._seen: dict[str, set[int]] = defaultdict(set)

    def _write(self, request_id: str, num_tokens: int) -> None:
        super()._write(request_id, num_tokens)
        row, seen = self.rows[request_id], self._seen[request_id]
        end = min(row.num_computed + num_tokens, len(row.prompt))
        computed = row.prefixes[row.num_computed + 1 : end + 1]
        self.num_computed[request_id] += len(computed)
        self.num_recomputed[request_id] += len(seen.intersection(computed))
        seen.update(row.prefixes[1 : end + 1])

    def take_counts(self, request_id: str) -> tuple[int, int]:
        """Computed, and computed again, for the request that has had this id until now."""
        self._seen.pop(request_id, None)
        return self.num_computed.pop(request_id, 0), self.num_recomputed.pop(request_id, 0)


class CountingV1Runner(Counting, V1OracleRunner):
    """Counts for the first kind of model runner."""


class CountingV2Runner(Counting, V2OracleRunner):
    """Counts for the second kind of model runner."""


def problems(
    record: RequestRecord, client: Client, has_prefix_cache: bool, *, can_copy: bool, may_load: bool = False
) -> list[str]:
    """What is wrong with the record of a client of the fuzz."""
    num_computed, num_recomputed = client.counts
    taken = list(takewhile(lambda chunk: len(chunk[1]) < client.max_model_len, client.sent))
    prompts = [prompt for _, prompt in taken]
    chunks = [(at_s, len(new), num_shared(old, new)) for (_, old), (at_s, new) in pairwise([(0.0, ()), *taken])]
    only_grows = all(new[: len(old)] == old for old, new in pairwise(prompts))
    is_finished = record.outcome == "finished"
    checks = {
        "outcome": record.outcome in outcomes(client),
        "kind": record.is_stream == client.is_stream,
        "chunks": [(c.arrival_s, c.num_tokens, c.num_shared) for c in record.chunks]
        == chunks * (client.is_stream and not client.lacks_start),
        "arrival": record.arrival_s == client.sent[0][0],
        "times": are_ordered(record, may_load=may_load),
        "KV times": not is_finished or record.last_kv_s is not None,
        "prompt": not prompts or record.num_prompt_tokens == len(prompts[-1]),
        "answer": not is_finished or record.num_output_tokens == len(client.tokens),
        "num_computed": record.num_computed == num_computed,
        # A prompt may come back that was invalidated: that is new to the record, but not to the runner.
        "num_recomputed": record.num_recomputed <= num_recomputed,
        "num_recomputed if nothing is invalidated": not only_grows or record.num_recomputed == num_recomputed,
        "num_invalidated": record.num_invalidated == sum(c.num_invalidated for c in record.chunks),
        "num_invalidated if nothing is": not only_grows or record.num_invalidated == 0,
        "num_from_cache": has_prefix_cache or may_load or record.num_from_cache == 0,
        "tokens in all": not is_finished
        or record.num_computed - record.num_recomputed + record.num_from_cache + record.num_loaded >= len(prompts[-1]),
        "num_loaded": record.num_loaded >= 0,
        "drafts": 0 <= record.num_accepted <= record.num_verified and (client.has_draft or record.num_verified == 0),
        "copies": 0 <= record.num_copied <= record.num_copies_verified <= can_copy * 1_000_000,
        "preemptions": all(p.num_tokens_lost > 0 for p in record.preemptions),
        "the same on the result": client.record in (None, record),
    }
    return [what for what, is_right in checks.items() if not is_right]


def outcomes(client: Client) -> tuple[str, ...]:
    if client.is_aborted:  # perhaps before its client heard of the failure
        return ("aborted", "failed") if client.is_too_long or client.must_fail else ("aborted",)
    return ("failed",) if client.ending == FinishReason.ERROR else ("finished",)


def are_ordered(record: RequestRecord, *, may_load: bool) -> bool:
    ended_s = record.finished_s
    life = [record.arrival_s, record.queued_s, record.scheduled_s, record.first_kv_s, record.last_kv_s, ended_s]
    arrivals = [record.arrival_s, *(chunk.arrival_s for chunk in record.chunks), ended_s]
    # What a connector has loaded may be lost before the request is scheduled.
    first_s = record.arrival_s if may_load else record.scheduled_s
    preemptions = [first_s, *(preemption.at_s for preemption in record.preemptions), ended_s]
    return all(is_sorted([at_s for at_s in times if at_s is not None]) for times in (life, arrivals, preemptions))


def is_sorted(times: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(times))


def num_shared(old: Sequence[int], new: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
