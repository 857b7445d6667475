"""Faults of one line, put into our own code one at a time. The fuzz must find each within the seeds that it is allowed.

    python -m tests.engine.mutants

The source text is changed while it is imported; no file is touched. What clients do not notice, or too rarely for the
fuzz, is found by a directed test instead.
"""

import argparse
import importlib
import importlib.machinery
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

__all__ = ["MUTANTS", "Mutant", "main", "seeds_to_catch"]

CAUGHT = 10  # the exit status of a process whose test has failed; not 1, with which Python ends after any error
FIRST_TRANSFER = 1_000_000  # of the fuzz, which is not imported before a mutant is in place
OURS = ("streamrag", "tests.engine.fuzz", "tests.engine.oracle", "tests.sessions.fuzz")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`new` instead of `old`, which stands once in the module."""

    name: str
    module: str
    old: str
    new: str
    within: int
    """Seeds within which it must be caught."""
    test: str = ""
    """The directed test that must catch it, where the fuzz cannot."""
    fuzz: str = "tests.engine.fuzz"
    first: int = 0
    """The first of these seeds."""


LOG = "streamrag.backends.vllm.scheduler.request_log"
PROMPTS, INTAKE = "streamrag.backends.vllm.scheduler.kv.replacement", "streamrag.backends.vllm.scheduler.intake"
HOOKS, STEP = "streamrag.backends.vllm.scheduler.hooks", "streamrag.backends.vllm.scheduler.step"
EXECUTOR, STEPS = "streamrag.backends.vllm.scheduler.plan_executor", "streamrag.backends.vllm.scheduler.steps_in_flight"
OUTBOX, QUEUES = "streamrag.backends.vllm.scheduler.outbox", "streamrag.backends.vllm.scheduler.queues"
EVICTION = "streamrag.backends.vllm.scheduler.kv.eviction"
HOST_MEMORY, HOST_POOL = "streamrag.backends.vllm.scheduler.host_memory.memory", "streamrag.engine.host_pool"
HOST_LOADS, CONNECTOR = "streamrag.backends.vllm.scheduler.host_memory.loads", "streamrag.backends.vllm.connector"
SUPPORTED = "streamrag.backends.vllm.scheduler.supported"
OF_PRODUCERS = "tests/backends/vllm/scheduler/test_kv_producer.py"
WIRE, DRAFTS = "streamrag.backends.vllm.chunk_wire", "streamrag.engine.drafts"
KV_MEMORY = "streamrag.backends.vllm.scheduler.kv.memory"
REQUEST = "streamrag.backends.vllm.scheduler.request"
TRACKER, TRACKER_TEST = "streamrag.routing.replica_tracker", "tests/routing/test_replica_tracker.py"
INDEX, INDEX_TEST = "streamrag.routing.prefix_index", "tests/routing/test_prefix_index.py"
SOONEST = "streamrag.routing.soonest"
SIMPLE, ROUTERS_TEST = "streamrag.routing.router", "tests/routing/test_routers.py"
CLASSES, RULES = "streamrag.engine.urgency_classes", "streamrag.engine.rules."
WALK, VICTIMS = "streamrag.engine.walk", "streamrag.engine.victims"
ADMISSION = "streamrag.backends.vllm.scheduler.kv.eviction"
LATER = "streamrag.backends.vllm.scheduler.kv.later_hits"
OF_LATER, OF_PLANS = "tests/backends/vllm/scheduler/test_later_hits.py", "tests/engine/test_planning.py"
POLICIES, PLACES_TEST = "streamrag.engine.policies", "tests/engine/test_places.py"
OF_SCHEDULER = "tests/backends/vllm/scheduler/test_scheduler.py"
OF_CONNECTORS = "tests/backends/vllm/scheduler/test_third_party_connector.py"
OF_MAMBA = "tests/backends/vllm/scheduler/test_mamba.py"
OF_CLASSES = "tests/backends/vllm/scheduler/test_classes.py"

ESTIMATES, QUERY_PROMPTS = "streamrag.backends.vllm.scheduler.estimates", "streamrag.query.prompts"

MUTANTS = (
    Mutant(
        "a source is known by what follows a head",
        ESTIMATES,
        "update.num_old > 0 and stream.source_name == update.source_name",
        "update.num_old > 0",
        0,  # the fuzz has no sources
        f"{OF_SCHEDULER}::test_a_source_is_not_known_by_the_head_that_its_first_chunk_follows",
    ),
    Mutant(
        "a head is sent whatever the overlap",
        QUERY_PROMPTS,
        'is_head_due = state.overlap.way == "immediate" and self.num_head > 0',
        "is_head_due = self.num_head > 0",
        0,  # the fuzz has no queries
        "tests/query/test_head.py::test_the_head_is_sent_only_if_prefill_is_immediate",
    ),
    Mutant(
        "drafts decode as answers do",
        STEP,
        'elif request.is_decoding and request.request_class != "draft":',
        "elif request.is_decoding:",
        400,
    ),
    Mutant(
        "a preempted draft is resumed without what it has shown",
        QUEUES,
        "                continue  # vLLM resumes it with its output\n",
        "",
        400,
    ),
    Mutant(
        "a step that ends early verifies the whole draft",
        REQUEST,
        "self.spec_token_ids = self.spec_token_ids[: max(end - num_known, 0)]",
        "pass",
        800,
    ),
    Mutant(
        "what the model has room for does not bound what is verified",
        REQUEST,
        "most = min(most, self.max_tokens - self.num_output_tokens - 1)",
        "most = min(most, 1_000)",
        0,  # vLLM does not verify more either, and drops what is too much
        "tests/backends/vllm/scheduler/test_drafts.py"
        "::test_the_end_of_the_answer_and_of_the_model_bounds_what_is_verified",
    ),
    Mutant(
        "a draft leaves no budget for prompts, and is not counted",
        STEP,
        "num_tokens = self.scheduler.max_num_scheduled_tokens - sum(len(r.spec_token_ids) for r in decoding)",
        "num_tokens = self.scheduler.max_num_scheduled_tokens",
        400,
    ),
    Mutant(
        "blocks of drafts are not counted",
        STEP,
        "memory.num_free_blocks -= num_groups * (cdiv(end + num_tokens, block_size) - cdiv(end, block_size))",
        "pass",
        1_500,
    ),
    Mutant(
        "a draft may have tokens that the model does not have",
        INTAKE,
        "if message.draft and max(message.draft) >=",
        "if message.draft and -1 >=",
        0,  # the fuzz has no such tokens
        "tests/backends/vllm/scheduler/test_drafts.py"
        "::test_a_draft_with_a_token_that_the_model_does_not_have_fails_its_request_only",
    ),
    Mutant(
        "copies from prompts cannot be switched off",
        INTAKE,
        "AnswerDraft(tokens, max_depth, (is_searched and request.prompt_token_ids) or ())",
        "AnswerDraft(tokens, max_depth, request.prompt_token_ids)",
        400,
    ),
    Mutant(
        "the placeholders of images are copied",
        INTAKE,
        "is_searched = self.options.prompt_lookup and not request.has_encoder_inputs",
        "is_searched = self.options.prompt_lookup",
        0,  # the fuzz has no images
        "tests/backends/vllm/scheduler/test_drafts.py"
        "::test_an_answer_with_a_grammar_copies_nothing_nor_does_one_to_a_prompt_with_images",
    ),
    Mutant(
        "an answer with a grammar copies",
        INTAKE,
        "if not max_depth or request.use_structured_output:",
        "if not max_depth:",
        0,  # grammars of the fuzz allow everything
        "tests/backends/vllm/scheduler/test_drafts.py"
        "::test_an_answer_with_a_grammar_copies_nothing_nor_does_one_to_a_prompt_with_images",
    ),
    Mutant(
        "the first place in the prompt is copied, whatever was quoted last",
        DRAFTS,
        "self.place = int(ends[nearest if nearest < len(ends) else 0])",
        "self.place = int(ends[0])",
        0,  # any place is exact, some save fewer steps
        "tests/engine/test_drafts.py::test_the_next_matching_place_after_the_last_quotation_is_copied",
    ),
    Mutant(
        "the prompt is copied although the draft has that place too",
        DRAFTS,
        "for text in (self._draft, self._prompt) if",
        "for text in (self._prompt, self._draft) if",
        0,
        "tests/engine/test_drafts.py::test_the_prompt_is_searched_only_where_the_draft_has_nothing",
    ),
    Mutant(
        "drafts take from others whatever they want",
        RULES + "drafts",
        "return most if most >= 1 else 0",
        "return NO_LIMIT",
        0,  # answers stay exact
        "tests/engine/test_rules.py::test_a_draft_takes_from_others_no_more_than_one_of_its_tokens_saves",
    ),
    Mutant(
        "drafts evict others",
        RULES + "drafts",
        "return Wait.YIELD if candidate.num_missing > -self._num_blocks else None",
        "return None",
        0,  # what was evicted is computed again
        "tests/engine/test_rules.py::test_drafts_evict_no_request_and_leave_memory_free_while_others_compute",
    ),
    Mutant(
        "the policy may put drafts before others",
        WALK,
        'if r.request_class == "draft"]',
        "if False]",
        0,
        "tests/engine/test_rules.py::test_drafts_come_last_and_lend_their_blocks",
    ),
    Mutant(
        "KV past the LCP is kept",
        PROMPTS,
        "min(request.num_computed_tokens, num_shared, len(new_tokens) - 1)",
        "min(request.num_computed_tokens, len(new_tokens) - 1)",
        50,
    ),
    Mutant(
        "nothing is left to compute of an identical prompt",
        PROMPTS,
        "min(request.num_computed_tokens, num_shared, len(new_tokens) - 1)",
        "min(request.num_computed_tokens, num_shared)",
        50,
    ),
    Mutant(
        "the state of a Mamba layer is kept after an update",
        PROMPTS,
        "        release_kv(scheduler, request)\n        return 0\n    (group,) = managers",
        "        return num_valid\n    (group,) = managers",
        200,
    ),
    Mutant(
        "the runner remembers where the state of a Mamba layer was",
        STEPS,
        "scheduler_output.preempted_req_ids.update(new.req_id for new in scheduler_output.scheduled_new_reqs)",
        "pass",
        400,
    ),
    Mutant(
        "a partial prompt ends within a block of states",
        REQUEST,
        " // self.prefill_unit * self.prefill_unit",
        "",
        200,
    ),
    Mutant(
        "a step is shorter than a block of states",
        RULES + "tokens",
        "max(candidate.num_allowed // self._num_tokens, 1)",
        "candidate.num_allowed // self._num_tokens",
        400,
    ),
    Mutant(
        "states of the last step are not used yet",
        KV_MEMORY,
        "        self._manager.new_step_starts()",
        "        pass",
        0,
        OF_MAMBA,
    ),
    Mutant("a shared block is written", PROMPTS, "if offset and not manager", "if False and not manager", 100),
    Mutant(
        "block hashes of the old prompt are kept",
        PROMPTS,
        "        del request.block_hashes[num_shared // scheduler.hash_block_size :]\n",
        "",
        50,
    ),
    Mutant("freed blocks are still held", PROMPTS, "    del blocks[num_kept:]\n", "", 50),
    Mutant(
        "cached blocks are counted as before",
        PROMPTS,
        "min(group.num_cached_block[request.request_id], num_full)",
        "group.num_cached_block[request.request_id]",
        100,
    ),
    Mutant(
        "the runner's copy of the prompt is changed",
        PROMPTS,
        "request.prompt_token_ids = tokens.copy()",
        "request.prompt_token_ids = tokens",
        100,
    ),
    Mutant(
        "a preempted request is resumed with its old prompt",
        QUEUES,
        "        # The model runner would resume a PREEMPTED request with the prompt that it remembers.\n"
        "        stream.status = RequestStatus.WAITING\n",
        "        stream.status = max(stream.status, RequestStatus.WAITING)\n",
        200,
    ),
    Mutant(
        "a chunk that is superseded is not acknowledged",
        INTAKE,
        "        self.outbox.acknowledge(stream)  # the chunks before\n",
        "",
        50,
    ),
    Mutant(
        "a chunk that is computed is not acknowledged",
        QUEUES,
        "        self.idle[stream.request_id] = stream\n        self.outbox.acknowledge(stream)\n",
        "        self.idle[stream.request_id] = stream\n",
        50,
    ),
    Mutant("the engine sleeps on answers", HOOKS, "if not self.plugin.outbox.is_empty:", "if False:", 200),
    Mutant(
        "a token is expected of a partial prompt",
        STEPS,
        "            request.num_output_placeholders = 0\n",
        "",
        50,
    ),
    Mutant(
        "a partial prompt shows its last token",
        REQUEST,
        "else (num_tokens - 1) // self.prefill_unit",
        "else num_tokens // self.prefill_unit",
        50,
    ),
    Mutant(
        "slots of the second runner are not given back",
        QUEUES,
        "        # The second model runner frees the slots of exactly these; the first one ignores the set.\n"
        "        self.scheduler.reset_preempted_req_ids.add(request.request_id)\n",
        "",
        50,
    ),
    Mutant("nobody gives up a slot", QUEUES, "if num_wanted <= 0:", "if num_wanted <= 0 or True:", 200),
    Mutant(
        "an aborted stream stays idle",
        QUEUES,
        "            self.idle.pop(request_id, None)\n",
        "            pass\n",
        100,
    ),
    Mutant(
        "what an update invalidates stays known",
        LOG,
        "min(self.num_ever_computed, chunk.num_shared)",
        "self.num_ever_computed",
        50,
    ),
    Mutant("a loss of KV is not noticed", LOG, "        self.num_present = 0\n", "", 100),
    Mutant(
        "a block is loaded that was not saved", HOST_POOL, "block is None or not block.is_valid", "block is None", 400
    ),
    Mutant("a slot has two blocks", HOST_POOL, "if self._saving.get(block.slot) != key:", "if True:", 400),
    Mutant(
        "a slot is loaded and overwritten",
        HOST_POOL,
        "            self._remove_from_lru(key, self._blocks[key])\n",
        "            pass\n",
        400,
    ),
    Mutant(
        "a block is saved that was overwritten before",
        HOST_MEMORY,
        "            del self._released[block_id]\n",
        "",
        400,
    ),
    Mutant(
        "blocks are loaded into the wrong place",
        HOST_MEMORY,
        "[request.request_id][start:end]",
        "[request.request_id][: end - start]",
        400,
    ),
    Mutant(
        "what was computed from a failed load stays",
        HOST_LOADS,
        "steps = [self._ended, *self._in_flight]",
        "steps = [Suspects({}, set(block_ids), set())]",
        400,
    ),
    Mutant("what may not have been loaded is saved", HOST_MEMORY, "if block_id not in uncertain:", "if True:", 1_000),
    Mutant(
        "what is known to be wrong is saved",
        HOST_MEMORY,
        "self._released.pop(block_id, None)",
        "pass",
        0,
        "tests/backends/vllm/scheduler/test_host_memory.py",
    ),
    Mutant("the ended keep host memory", HOST_MEMORY, "        self.pool.release(request.request_id)\n", "", 100),
    Mutant("an answer after a failed load counts", EVICTION, "(request, drop_stale_output=True)", "(request)", 1_000),
    Mutant("idle streams are no victims", VICTIMS, "for r in self._idle() if r.num_blocks]", "for r in ()]", 100),
    # What only the rarer situations show.
    Mutant(
        "host memory survives a reset",
        HOOKS,
        "                self.plugin.host_memory.clear()\n",
        "                pass\n",
        1_000,
    ),
    Mutant(
        "host memory forgets before the running requests are preempted",
        HOOKS,
        "            return super().reset_prefix_cache(reset_running_requests, reset_connector)\n"
        "        finally:\n"
        "            # Last, whether or not vLLM resets its connector: running requests have only now released their "
        "blocks.\n"
        "            if self.plugin.host_memory is not None:\n"
        "                self.plugin.host_memory.clear()\n",
        "            if self.plugin.host_memory is not None:\n"
        "                self.plugin.host_memory.clear()\n"
        "        finally:\n"
        "            return super().reset_prefix_cache(reset_running_requests, reset_connector)\n",
        3_000,
    ),
    Mutant(
        "the end of input ends answers too",
        INTAKE,
        "not stream.is_complete and not stream.is_finished():",
        "not stream.is_finished():",
        200,
    ),
    Mutant("finishing all requests finishes none", HOOKS, "ids = list(self.requests)", "ids = []", 200),
    Mutant("a failed load is tried for ever", HOST_MEMORY, "        self.pool.drop(wrong.keys.values())\n", "", 3_000),
    Mutant(
        "a possibly bad load is written through",
        HOST_MEMORY,
        "if blocks[index].block_id in uncertain:",
        "if False:",
        0,  # a partial prompt that loads, a load that fails, and little memory and time for a copy in between: too rare
        "tests/backends/vllm/scheduler/test_write_through.py"
        "::test_blocks_computed_from_a_load_are_copied_once_the_load_is_known_good",
    ),
    Mutant(
        "what another computes in this very step is written through",
        HOST_MEMORY,
        "            if request_id in self._prefix_hits:\n",
        "            if False:\n",
        0,  # two prompts that are the same but for their ends, short of memory: once in 10,000 seeds
        "tests/backends/vllm/scheduler/test_write_through.py"
        "::test_cached_blocks_computed_in_the_same_step_are_not_copied_too_early",
    ),
    Mutant("a pause plans and evicts", HOOKS, "if self.pause_state != PauseState.UNPAUSED:", "if False:", 3_000),
    Mutant(
        "speculative prompts evict as well",
        RULES + "memory_rules",
        "self._can_growing_now and not candidate.request.is_speculative",
        "self._can_growing_now",
        0,  # it is only computed in vain
        "tests/engine/test_planning.py::test_a_growing_prompt_may_evict_where_allowed_and_a_replaced_one_may_not",
    ),
    Mutant(
        "partial prompts evict whatever host memory has room for",
        HOST_MEMORY,
        "if num_blocks > MOST_OVERCOMMITTED * self.pool.num_slots:",
        "if False:",
        0,  # as above
        "tests/backends/vllm/scheduler/test_host_memory.py"
        "::test_partial_prompts_take_memory_from_each_other_only_if_the_host_holds_it",
    ),
    Mutant(
        "partial prompts are put off though nothing computes",
        STEP,
        "LateBinding(lambda: self.steps.has_prefills, sized)",
        "LateBinding(lambda: True, sized)",
        500,
    ),
    Mutant(
        "a step of partial prompts is planned as early as any",
        RULES + "sized_steps",
        "        if walk.num_ahead or not self._has_prefills_in_flight():\n",
        "        if True:\n",
        0,  # nothing is wrong with it but the time that it takes
        "tests/backends/vllm/scheduler/test_scheduler.py"
        "::test_a_prompt_that_becomes_complete_waits_for_one_step_of_partial_prompts_at_most",
    ),
    Mutant(
        "who is ready with a step waits for all that fits into it",
        RULES + "sized_steps",
        "if not costs.is_worth_adding(in_one_step, self._num_added, self._num_waiting - self._num_added):",
        "if False:",
        0,  # as above
        "tests/engine/test_planning.py::test_a_request_that_a_step_completes_waits_little_more_than_the_overhead",
    ),
    Mutant(
        "steps are as long as the budget, however many come",
        RULES + "sized_steps",
        "costs.best_length(self._num_waiting) if costs else math.inf",
        "math.inf",
        0,  # as above
        "tests/engine/test_planning.py::test_a_long_prompt_is_cut_into_even_parts_where_others_come_often",
    ),
    Mutant(
        "a step is as long whatever its tokens attend to",
        RULES + "sized_steps",
        "costs.num_fitting(length, candidate.num_present)",
        "length",
        0,  # as above
        "tests/engine/test_planning.py::test_a_step_has_fewer_tokens_behind_a_long_prompt",
    ),
    Mutant(
        "a step leaves a short rest of a prompt to the next one",
        RULES + "sized_steps",
        "costs.even_part(length + rest, self._best_length) - length",
        "self._best_length - self._length",
        0,  # as above
        "tests/engine/test_planning.py::test_a_long_prompt_is_cut_into_even_parts_where_others_come_often",
    ),
    Mutant(
        "partial prompts fill a step before a complete one has its part",
        RULES + "sized_steps",
        "length = self._length if self._num_added else 0.0",
        "length = self._length",
        0,  # as above
        "tests/engine/test_planning.py::test_a_prompt_gets_its_part_of_a_step_that_others_have_filled",
    ),
    Mutant(
        "some answers have no next token in a short step",
        RULES + "sized_steps",
        "candidate.num_present >= request.num_tokens - 1",
        "candidate.num_present == request.num_tokens",
        0,  # as above
        "tests/engine/test_planning.py::test_every_answer_has_its_next_token_in_a_short_step",
    ),
    Mutant(
        "a long step of complete prompts is planned early",
        RULES + "sized_steps",
        "return costs.is_worth_putting_off(length, self._num_waiting)",
        "return False",
        0,  # as above
        "tests/engine/test_planning.py::test_a_long_step_of_complete_prompts_is_put_off_where_others_come_often",
    ),
    Mutant(
        "a step has more LoRA adapters than there is room for",
        RULES + "memory_rules",
        " and len(self._adapters) >= self._max_adapters",
        " and False",
        0,  # the fuzz has no adapters
        "tests/backends/vllm/scheduler/test_adapters.py",
    ),
    Mutant(
        "the LoRA adapters of requests that decode do not count",
        RULES + "memory_rules",
        "set(self._adapters_ahead())",
        "set()",
        0,  # as above
        "tests/backends/vllm/scheduler/test_adapters.py",
    ),
    Mutant(
        "who comes back from host memory is ordered as if all were to be computed",
        EVICTION,
        "            request.num_kept_tokens = request.num_computed_tokens\n",
        "",
        0,  # as above
        "tests/backends/vllm/scheduler/test_had_back.py::test_a_stream_with_kv_in_host_memory_counts_as_nearly_done_and_goes_first",
    ),
    Mutant(
        "what an update replaced is still counted as had back",
        PROMPTS,
        "    request.num_kept_tokens = min(request.num_kept_tokens, num_shared)\n",
        "",
        0,  # as above
        "tests/backends/vllm/scheduler/test_had_back.py::test_kv_that_an_update_replaces_does_not_count_as_kept",
    ),
    Mutant(
        "who is stuck is remembered in a pause",
        HOOKS,
        "        self.plugin.executor.forget_stuck()\n        super().set_pause_state(pause_state)\n",
        "        super().set_pause_state(pause_state)\n",
        2_000,
    ),
    Mutant(
        "who got stuck with a step in flight is not told",
        HOOKS,
        "        if step.prefills:\n",
        "        if False:\n",
        0,  # all must be stuck at once, with nothing else to come
        "tests/backends/vllm/scheduler/test_waiting.py"
        "::test_a_client_hears_of_a_prompt_that_got_stuck_while_its_last_step_was_in_flight",
    ),
    Mutant(
        "a grammar that is ready is looked at only while nobody else waits",
        QUEUES,
        "        if not self.scheduler._handle_blocked_waiting_request(request):\n",
        "        scheduler = self.scheduler\n"
        "        is_blocked = scheduler._is_blocked_waiting_status(request.status) and len(scheduler.waiting) > 1\n"
        "        if is_blocked or not self.scheduler._handle_blocked_waiting_request(request):\n",
        200,
    ),
    Mutant(
        "a stream does not wait for its grammar",
        REQUEST,
        "            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR\n",
        "",
        200,
    ),
    Mutant(
        "a stream waits for the grammar of its first chunk",
        INTAKE,
        "        if not stream.is_complete:\n            stream.drop_grammar()\n",
        "",
        200,
    ),
    Mutant("a gap is not noticed", INTAKE, "if message.index != stream.num_messages:", "if False:", 100),
    Mutant(
        "chunks of a stream that has ended are answered with errors",
        INTAKE,
        "return request.resumable and request.request_id in self.records.gone_ids",
        "return False",
        200,
    ),
    Mutant(
        "a chunk without a stream is dropped",
        INTAKE,
        "return request.resumable and request.request_id in self.records.gone_ids",
        "return True",
        200,
    ),
    Mutant(
        "an empty prompt is taken in",
        INTAKE,
        "if request.num_prompt_tokens + (message.num_kept if message else 0) < 1:",
        "if False:",
        0,
        "tests/backends/vllm/scheduler/test_intake.py::test_a_chunk_that_leaves_an_empty_prompt_fails_its_stream",
    ),
    Mutant("a chunk keeps more than there is", INTAKE, "message.num_kept > stream.num_all_tokens", "False", 400),
    Mutant("fields are not checked", WIRE, "FIELDS[name].validate_python(value)", "pass", 200),
    Mutant("what is no mapping is read as one", WIRE, "if not isinstance(fields, dict):", "if False:", 200),
    Mutant(
        "output in flight goes to the next request of the id",
        INTAKE,
        "        drop_output_in_flight(stream)\n",
        "",
        400,
    ),
    Mutant("what the ended have lost is kept for them", HOST_MEMORY, "in request.released_blocks:", "in ():", 200),
    Mutant("vLLM sees what an empty plan leaves out", EXECUTOR, "not step.order and", "not step_plan.grants and", 200),
    Mutant("lookups outlive their step", EXECUTOR, "            self.kv_memory.end_step()\n", "", 200),
    Mutant(
        "what was found is true of the next time",
        CONNECTOR,
        '(request_id, match), self._match = self._match, ("", None)',
        "request_id, match = self._match",
        0,  # who starts with KV that it holds was rarely asked about just before, and only its record would be wrong
        "tests/backends/vllm/scheduler/test_host_memory.py"
        "::test_a_match_in_host_memory_counts_once_and_for_its_own_request",
    ),
    Mutant(
        "what host memory has written through outlives the request",
        HOST_MEMORY,
        "        self._num_written.pop(request.request_id, None)\n",
        "",
        3_000,
    ),
    Mutant(
        "what is written through is not written anew after a reset",
        HOST_MEMORY,
        "        self._num_written.clear()\n",
        "",
        0,  # all is recomputed then, and nothing is wrong
        "tests/backends/vllm/scheduler/test_host_memory.py::test_idle_streams_write_through_again_after_a_reset",
    ),
    # The next two make a step come out short; then the plan sees the true numbers. All is later, nothing is wrong.
    Mutant(
        "the watermark is not planned for",
        KV_MEMORY,
        "return num_needed + self._manager.watermark_blocks",
        "return num_needed",
        0,
        "tests/backends/vllm/scheduler/test_kv_memory.py::test_a_request_that_starts_needs_the_watermark_as_well",
    ),
    Mutant(
        "shared blocks count as freed",
        KV_MEMORY,
        "block.ref_cnt == 1 and not",
        "not",
        0,
        "tests/backends/vllm/scheduler/test_kv_memory.py::test_blocks_that_others_hold_as_well_do_not_come_free",
    ),
    # It matters only if those with a slot do not decode, which they mostly do, and then run ahead of any plan.
    Mutant(
        "those that have shown a token take each other's slots",
        WALK,
        "        self.with_output.sort(key=lambda r: not r.is_running)\n",
        "",
        0,
        "tests/engine/test_planning.py::test_requests_that_hold_a_slot_come_first_among_those_with_output",
    ),
    Mutant(
        "a place that follows the clock is kept",
        CLASSES,
        'return r.is_complete or r.request_class == "stream"',
        "return True",
        0,
        "tests/engine/test_policies.py::test_earlier_orders_do_not_change_the_order_of_a_policy",
    ),
    Mutant(
        "classes do not age",
        CLASSES,
        "since_s + rank * self._ageing_s",
        "rank",
        0,
        "tests/engine/test_policies.py::test_a_request_of_a_class_is_overtaken_only_by_what_comes_within_its_bound",
    ),
    Mutant(
        "each batch of a session's data waits anew",
        QUEUES,
        "        if self.idle.pop(stream.request_id, None):\n            stream.since_s = stream.last_chunk_s\n",
        "        stream.since_s = stream.last_chunk_s\n        if self.idle.pop(stream.request_id, None):\n",
        0,
        f"{OF_CLASSES}::test_data_of_a_session_are_served_within_their_bound_however_many_questions_come",
    ),
    Mutant(
        "data take what is kept for questions",
        RULES + "memory_rules",
        "return Wait.RESERVE if -self._num_blocks < candidate.num_missing <= 0 else None",
        "return None",
        0,
        f"{OF_CLASSES}::test_data_wait_while_memory_is_nearly_full_and_questions_go_on",
    ),
    Mutant(
        "a question is planned on memory that data keep",
        "streamrag.engine.walk",
        "                self.victims.offer(held.request, held.position)\n",
        "                pass\n",
        0,
        "tests/engine/test_rules.py::test_a_question_takes_from_data_what_nothing_else_can_give_it",
    ),
    Mutant(
        "data fill their steps",
        RULES + "tokens",
        'return self._num_share if candidate.request.request_class == "stream" else NO_LIMIT',
        "return NO_LIMIT",
        0,
        f"{OF_CLASSES}::test_data_of_one_session_do_not_fill_the_steps_of_others",
    ),
    Mutant(
        "what is over the budget begins behind what is not",
        RULES + "memory_rules",
        "        if not self._is_over:\n",
        "        if True:\n",
        0,
        "tests/engine/test_planning.py::test_a_request_over_the_budget_runs_alone_and_no_complete_one_passes_it",
    ),
    Mutant(
        "what was claimed stays claimed",
        ADMISSION,
        "            self._num_claimed -= request.num_blocks_claimed\n",
        "",
        0,
        f"{OF_CLASSES}::test_an_evicted_request_claims_no_budget_until_it_begins_again",
    ),
    Mutant("nobody is ever alone in the budget", ADMISSION, "self._num_claims -= 1", "pass", 100),
    Mutant(
        "no follower waits",
        RULES + "grouped_prefills",
        "        if request.is_running:\n",
        "        if True:\n",
        0,
        f"{OF_CLASSES}::test_streams_that_get_the_same_chunk_compute_it_once",
    ),
    Mutant("a later hit: the block that is not whole is kept", LATER, "blocks[start:] = found", "blocks += found", 100),
    Mutant("a later hit: nobody holds it", LATER, "        self._pool.touch(found)\n", "", 100),
    Mutant("a later hit: the blocks behind the next", LATER, "in range(start, end):", "in range(start + 1, end):", 100),
    Mutant(
        "a later hit: nothing is left to compute",
        LATER,
        "end = min((request.num_tokens - 1) // self._block_size, len(block_hashes))",
        "end = min(request.num_tokens // self._block_size, len(block_hashes))",
        100,
    ),
    Mutant(
        "a later hit: its block is known by its last hash, and not by its own",
        LATER,
        "get_cached_block(block_hashes[index], self._group_ids)",
        "get_cached_block(block_hashes[-1], self._group_ids)",
        100,
    ),
    Mutant(
        "a later hit: it is taken for a block that a step in flight still writes",
        LATER,
        "start = request.num_computed_tokens // self._block_size\n        self._pool",
        "start = -(-request.num_computed_tokens // self._block_size)\n        self._pool",
        100,
    ),
    Mutant(
        "a later hit: cached blocks are counted as before",
        LATER,
        "        self._group.num_cached_block[request.request_id] = len(blocks)\n",
        "",
        100,
    ),
    Mutant(
        "a later hit: the model runner goes on with the old blocks",
        QUEUES,
        "        if request.status == RequestStatus.RUNNING:\n            self._leave_running(request)\n"
        "            request.status",
        "        if False:\n            request.status",
        100,
    ),
    Mutant(
        "acknowledged while still computing",
        QUEUES,
        "if stream.num_in_flight_tokens > stream.num_stale_output_tokens:",
        "if False:",
        100,
    ),
    Mutant(
        "an updated prompt's output in flight counts",
        PROMPTS,
        "request.num_stale_output_tokens = request.num_in_flight_tokens",
        "request.num_stale_output_tokens = 0",
        3_000,
    ),
    Mutant(
        "an updated prompt's output in flight is delivered",
        PROMPTS,
        "request.drop_stale_output = request.num_in_flight_tokens > 0",
        "request.drop_stale_output = False",
        3_000,
    ),
    Mutant(
        "a wrong number of computed tokens is acknowledged",
        OUTBOX,
        '"num_computed": stream.num_computed_tokens',
        '"num_computed": stream.num_prompt_tokens',
        50,
    ),
    # The next cost memory or time, or are unfair. No answer is wrong, so that the fuzz sees little of them.
    Mutant(
        "places are never forgotten",
        POLICIES,
        "if len(self._cached) > 2 * num_requests + 100:",
        "if False:",
        0,
        PLACES_TEST,
    ),
    Mutant(
        "the places of classes are never forgotten",
        CLASSES,
        "        self._places.trim(len(requests))\n",
        "",
        0,
        PLACES_TEST,
    ),
    Mutant(
        "the places of a policy are never forgotten",
        POLICIES,
        "        self._places.trim(len(requests))\n",
        "",
        0,
        PLACES_TEST,
    ),
    Mutant(
        "a later hit: whoever reads no prefix cache has it too",
        LATER,
        "request.skip_reading_prefix_cache or has",
        "has",
        0,
        f"{OF_LATER}::test_a_stream_that_reads_no_prefix_cache_takes_nothing_from_it_later",
    ),
    Mutant(
        "a later hit: what nobody holds counts as free",
        LATER,
        " + sum(block.ref_cnt == 0 for block in found)",
        "",
        0,
        f"{OF_LATER}::test_unheld_cached_blocks_are_no_longer_free_for_the_stream_that_takes_them",
    ),
    Mutant(
        "data take memory from others",
        RULES + "memory_rules",
        "        candidate.may_evict = False\n",
        "",
        0,
        f"{OF_PLANS}::test_data_of_a_session_take_no_memory_from_others_where_some_is_kept_from_them",
    ),
    Mutant(
        "the last of a group leads",
        RULES + "grouped_prefills",
        "self._leaders.setdefault(block, (candidate.request, candidate.num_present + candidate.num_allowed))",
        "self._leaders[block] = (candidate.request, candidate.num_present + candidate.num_allowed)",
        0,
        f"{OF_PLANS}::test_the_first_of_several_requests_that_compute_the_same_leads",
    ),
    Mutant(
        "those behind one that does not fit start",
        WALK,
        "        self.is_closed_to_new = True\n",
        "",
        0,
        f"{OF_PLANS}::test_no_request_starts_behind_one_that_does_not_fit",
    ),
    Mutant(
        "a partial prompt that does not fit keeps what it holds",
        WALK,
        "if wait is Wait.MEMORY or wait is Wait.YIELD:",
        "if wait is Wait.YIELD:",
        0,
        f"{OF_PLANS}::test_a_complete_prompt_may_evict_a_stuck_partial_prompt_before_it",
    ),
    Mutant(
        "what is over the budget keeps what it holds",
        WALK,
        "if wait is Wait.MEMORY or wait is Wait.YIELD:",
        "if wait is Wait.MEMORY:",
        0,
        f"{OF_PLANS}::test_a_begun_request_may_evict_prompts_over_the_budget_before_it",
    ),
    Mutant(
        "what comes behind what is over the budget keeps what it holds",
        RULES + "memory_rules",
        "return Wait.YIELD if self._is_over else None",
        "return Wait.SKIP if self._is_over else None",
        0,
        f"{OF_PLANS}::test_a_begun_request_may_evict_prompts_over_the_budget_before_it",
    ),
    Mutant(
        "blocks that are being loaded are not pinned",
        HOST_POOL,
        "        self._pinned.update(dict.fromkeys(keys))\n",
        "",
        0,
        "tests/engine/test_host_pool.py::test_a_pinned_block_outlives_its_owner_until_it_is_sent",
    ),
    Mutant(
        "a running request computes one token more than was planned",
        EXECUTOR,
        "            request.end_step_at(end)\n",
        "            request.end_step_at(end + 1)\n",
        0,
        "tests/backends/vllm/scheduler/test_grants.py::test_a_running_request_computes_as_many_tokens_as_it_is_granted",
    ),
    Mutant(
        "a prompt that starts computes past what was planned",
        EXECUTOR,
        "is_whole = self.kv_memory.theirs_may_load and request.is_complete and not grant.request.num_blocks",
        "is_whole = request.is_complete and not grant.request.num_blocks",
        20,
    ),
    Mutant(
        "a token is planned after the last one of an answer",
        REQUEST,
        "return num_sampling > 0 and num_at_least >= self.num_prompt_tokens + self.max_tokens",
        "return False",
        0,
        f"{OF_SCHEDULER}::test_a_request_whose_last_token_is_being_sampled_needs_no_more_memory",
    ),
    Mutant(
        "the model's length does not end an answer",
        INTAKE,
        "stream.limit_answer(stream.max_tokens, self.scheduler.max_model_len)",
        "pass",
        0,
        f"{OF_SCHEDULER}::test_a_request_whose_last_token_is_being_sampled_needs_no_more_memory",
    ),
    Mutant(
        "the model's length does not end the answer of a stream",
        PROMPTS,
        "stream.limit_answer(chunk.max_tokens, scheduler.max_model_len)",
        "stream.max_tokens = chunk.max_tokens",
        0,
        f"{OF_SCHEDULER}::test_a_request_whose_last_token_is_being_sampled_needs_no_more_memory",
    ),
    Mutant(
        "memory that the step in flight frees does not count",
        WALK,
        "return bool(self.grants or self.num_ahead or self.num_ending)",
        "return bool(self.grants or self.num_ahead)",
        0,
        f"{OF_SCHEDULER}::test_a_waiting_request_evicts_none_for_memory_that_the_step_in_flight_frees",
    ),
    Mutant(
        "an evicted request is handed over without its KV",
        EVICTION,
        "drop_stale_output = drop_stale_output or self.scheduler.requires_kv_delivery or self.theirs_may_load",
        "pass",
        0,
        f"{OF_PRODUCERS}::test_output_in_flight_of_an_evicted_request_is_computed_again_with_its_kv",
    ),
    Mutant(
        "the engine sleeps while a connector writes KV elsewhere",
        HOOKS,
        "if self.connector is not None and self.connector.has_pending_push_work():",
        "if False:",
        0,
        f"{OF_CONNECTORS}::test_the_engine_does_not_sleep_while_it_writes_kv_elsewhere",
    ),
    Mutant(
        "a stream that was loaded resumes with the prompt that the runner remembers",
        HOOKS,
        "if was_loading and is_ready and not request.num_output_tokens:",
        "if False:",
        0,
        f"{OF_CONNECTORS}::test_a_request_that_loses_loaded_kv_before_it_ran_is_loaded_and_answered_again",
    ),
    Mutant(
        "memory stays reserved for a load that was given up",
        PROMPTS,
        "    scheduler._inflight_prefills.discard(request)",
        "    pass",
        0,
        f"{OF_CONNECTORS}::test_a_request_that_loses_loaded_kv_before_it_ran_is_loaded_and_answered_again",
    ),
    Mutant(
        "KV that was not loaded stays in the prefix cache",
        EVICTION,
        "manager.evict_blocks({block.block_id for block in group.req_to_blocks[request_id][num_valid:]})",
        "pass",
        0,
        f"{OF_CONNECTORS}::test_kv_that_was_not_loaded_is_in_no_cache_when_its_request_is_evicted",
    ),
    Mutant(
        "a prompt whose load failed counts as computed",
        EVICTION,
        "request.log.num_present = min(request.log.num_present, request.num_computed_tokens)",
        "pass",
        0,
        f"{OF_CONNECTORS}::test_a_prompt_whose_load_failed_is_recorded_as_computed",
    ),
    Mutant(
        "blocks that a step in flight may write are evicted",
        VICTIMS,
        "if not self._memory.can_evict(victim):",
        "if False:",
        0,
        f"{OF_CONNECTORS}::test_blocks_that_a_step_in_flight_may_write_are_evicted_only_after_it",
    ),
    Mutant(
        "the engine sleeps while a victim rests",
        WALK,
        "            self.is_put_off = True\n",
        "",
        0,
        f"{OF_CONNECTORS}::test_blocks_that_a_step_in_flight_may_write_are_evicted_only_after_it",
    ),
    Mutant(
        "what a connector loads takes the tokens of those behind it",
        EXECUTOR,
        "            scheduler.waiting.extend(r for r in hidden if r.can_start)\n",
        "            pass\n",
        0,
        f"{OF_CONNECTORS}::test_loads_within_a_step_take_none_of_its_tokens",
    ),
    Mutant(
        "a load without memory takes tokens of running requests in every other step",
        EXECUTOR,
        "request.num_free_when_left = num_free\n",
        "pass\n",
        0,
        f"{OF_CONNECTORS}::test_a_load_without_memory_takes_nothing_from_running_ones_and_claims_nothing",
    ),
    Mutant(
        "a load without memory keeps its claim, so that those who hold the memory do not compute",
        EXECUTOR,
        "self.claims.release(request)\n",
        "pass\n",
        0,
        f"{OF_CONNECTORS}::test_a_load_without_memory_takes_nothing_from_running_ones_and_claims_nothing",
    ),
    Mutant(
        "who waits for a load claims memory",
        RULES + "memory_rules",
        "if candidate.request.has_claim or not candidate.num_tokens:",
        "if candidate.request.has_claim:",
        0,
        "tests/engine/test_planning.py::test_a_prompt_that_waits_for_its_load_claims_no_memory",
    ),
    Mutant(
        "what a connector still looks up is granted tokens again and again",
        EXECUTOR,
        "request.awaits_connector = is_left and",
        "request.awaits_connector = False and",
        0,
        f"{OF_CONNECTORS}::test_a_request_that_is_looked_up_takes_nothing_from_running_ones",
    ),
    Mutant(
        "a partial prompt is loaded while chunks change it",
        KV_MEMORY,
        "return Wait.MEMORY if is_async or",
        "return Wait.MEMORY if",
        0,
        f"{OF_CONNECTORS}::test_a_partial_prompt_that_would_be_loaded_between_steps_or_whole_waits_until_it_is_complete",
    ),
    Mutant(
        "NIXL in a prefill lane is taken for a connector that may load",
        SUPPORTED,
        'return not transfer.get_from_extra_config("bidirectional_kv_xfer", False)',
        "return False",
        0,
        f"{OF_PRODUCERS}::test_the_rest_of_a_complete_prompt_takes_no_more_of_a_step_than_is_planned",
    ),
    Mutant(
        "a query that has ended keeps the KV that was reserved for it",
        "streamrag.backends.lanes.lane_choice",
        "            self._num_queries_with[block] -= 1\n",
        "            pass\n",
        0,
        "tests/backends/lanes/test_lanes.py::"
        "test_a_query_waits_while_its_prompt_does_not_fit_into_the_kv_cache_beside_others",
    ),
    Mutant(
        "a prompt that is not computed to its end samples a token",
        STEPS,
        "request.view = request.step_end = None",
        "request.view = None",
        50,
    ),
    Mutant(
        "a gap is as long as the step that the chunk waited for",
        INTAKE,
        "sent_s = message.arrival_s if message is not None else",
        "sent_s = None if message is not None else",
        0,
        "tests/backends/vllm/scheduler/test_intake.py",
    ),
    Mutant(
        "steps are long until one was measured",
        "streamrag.engine.step_size",
        "int(self._step_s / self._token_s) if self._token_s else 0",
        "int(self._step_s / self._token_s) if self._token_s else self._max_tokens",
        0,
        "tests/engine/test_pace.py",
    ),
    # What only an engine with a third-party connector shows, or log-probabilities of prompts.
    Mutant(
        "the engine sleeps while a connector loads",
        EXECUTOR,
        "or step.blocked or num_loads",
        "or step.blocked",
        60,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "loaded prompts wait behind a load that they leave no memory",
        EXECUTOR,
        "key=lambda request: not request.num_computed_tokens",
        "key=lambda request: 0",
        0,
        f"{OF_CONNECTORS}::test_a_loaded_prompt_does_not_wait_behind_a_load_without_memory",
    ),
    Mutant(
        "a reset loses the log-probabilities of a prompt",
        HOOKS,
        "self.plugin.evictions.on_dropped_output(request)",
        "pass",
        0,
        "tests/backends/vllm/scheduler/test_waiting.py",
    ),
    Mutant(
        "a restart loses the log-probabilities of a prompt",
        EVICTION,
        "if has_prompt_logprobs(request) and not request.num_output_tokens:",
        "if False:",
        400,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "a connector is shown a part of a complete prompt",
        EXECUTOR,
        "if not is_whole and end < grant.request.num_tokens:",
        "if end < grant.request.num_tokens:",
        60,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "failed loads of a connector are not heard of",
        HOOKS,
        "failed = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)",
        "failed: set[str] = set()",
        200,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "blocks are freed while a connector loads into them",
        HOOKS,
        "super()._free_request(request, delay_free_blocks)",
        "super()._free_request(request)",
        200,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "the engine sleeps before KV is sent",
        HOOKS,
        "return len(self.requests) > sum(self.get_request_counts()) + len(self.plugin.queues.idle)",
        "return False",
        60,
        first=FIRST_TRANSFER,
    ),
    Mutant(
        "vLLM's own sessions are taken for plain requests",
        INTAKE,
        "return \"vLLM's own streaming sessions need vLLM's own scheduler\" if request.resumable else None",
        "return None",
        60,
        first=FIRST_TRANSFER,
    ),
    # Routers have no part in the fuzz.
    Mutant("a query counts twice", TRACKER, "        self.ended(query_id)\n", "", 0, TRACKER_TEST),
    Mutant("first tokens count twice", TRACKER, "            query.is_queued = False\n", "", 0, TRACKER_TEST),
    Mutant(
        "the lost are still open", TRACKER, "            del self._queries[name]", "            pass", 0, TRACKER_TEST
    ),
    Mutant("beginnings are forgotten first", INDEX, "in reversed(keys[:most])", "in keys[:most]", 0, INDEX_TEST),
    Mutant("use makes nothing recent", INDEX, "blocks.move_to_end(key)", "pass", 0, INDEX_TEST),
    Mutant(
        "the index has no bound", INDEX, "while self._num_blocks > self._max_blocks:", "while False:", 0, INDEX_TEST
    ),
    Mutant("keys know no predecessors", INDEX, "hash((key, *", "hash((0, *", 0, INDEX_TEST),
    Mutant("who lets go is found to the end", INDEX, "if len(holders) < len(before):", "if False:", 0, INDEX_TEST),
    Mutant("waiting costs nothing", SOONEST, "replica.num_new_tokens + ", "", 0, ROUTERS_TEST),
    Mutant("all are equally fast", SOONEST, "cost / (replica.tokens_per_s or usual)", "cost", 0, ROUTERS_TEST),
    Mutant("what is found costs as well", SOONEST, " - found.get(replica.id, 0)", "", 0, ROUTERS_TEST),
    Mutant("prompts do not grow", SOONEST, " + self.growth()", "", 0, ROUTERS_TEST),
    Mutant("sessions are not told apart", SIMPLE, "_mixed(key ^ _number(name))", "_number(name)", 0, ROUTERS_TEST),
)


class _MutantLoader(importlib.machinery.SourceFileLoader):
    """Reads the changed source, past the cache of compiled files."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        assert source.count(self.mutant.old) == 1, f"{self.mutant.name}: its text is not once in {fullname}"
        return self.source_to_code(source.replace(self.mutant.old, self.mutant.new).encode(), self.path)


class _MutantFinder:
    """Puts the loader in the place of Python's own for one module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        loader = _MutantLoader(name, spec.origin)
        loader.mutant = self.mutant
        spec.loader = loader
        return spec


@contextmanager
def _freshly_imported(mutant: Mutant) -> Iterator[ModuleType]:
    before = {name: module for name, module in sys.modules.items() if name.startswith(OURS)}
    finder: Any = _MutantFinder(mutant)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(mutant.fuzz)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(OURS)]:
            del sys.modules[name]
        sys.modules.update(before)


def seeds_to_catch(mutant: Mutant) -> tuple[int | None, str]:
    """After how many seeds the mutant is caught, and by what; None if it lives on."""
    with _freshly_imported(mutant) as fuzz:
        for seed in range(mutant.first, mutant.first + mutant.within):
            try:
                fuzz.run_seed(seed, Counter())
            except Exception as error:
                return seed - mutant.first + 1, f"{type(error).__name__}: {error}".splitlines()[0]
    return None, "alive"


def is_caught_by_test(mutant: Mutant) -> bool:
    """In a process of its own, into which nothing of ours has been imported yet. Any other error is no catch."""
    module = sys.modules["__main__"].__spec__  # which has this mutant among its own
    command = [sys.executable, "-m", module.name if module else "tests.engine.mutants", "--run-test-of", mutant.name]
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode in (0, CAUGHT), (result.stdout + result.stderr).decode()
    return result.returncode == CAUGHT


def run_test_of(name: str, mutants: Sequence[Mutant]) -> int:
    """Return `CAUGHT` if a test of a mutant, this process's only one, fails; 0 if all pass; else another number."""
    mutant = next(m for m in mutants if m.name == name)
    assert not [module for module in sys.modules if module.startswith("streamrag.")]
    finder: Any = _MutantFinder(mutant)
    sys.meta_path.insert(0, finder)
    pytest = importlib.import_module("pytest")
    failures = _Failures()
    try:
        # Other traces parse source texts, in which CPython 3.11 fails if the collector closes a generator meanwhile.
        options = ("-q", "-p", "no:cacheprovider", "--tb=native")
        status = int(pytest.main([mutant.test, *options], plugins=[failures]))
    except Exception:  # pytest may raise at its end what a failed test has left behind
        traceback.print_exc()
        status = 1
    return CAUGHT if failures.num else status and 1


class _Failures:
    """A plugin of pytest that counts the tests that fail."""

    num = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num += report.failed


def main(mutants: Sequence[Mutant] = MUTANTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of those to run")
    parser.add_argument("--run-test-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_test_of:
        return run_test_of(arguments.run_test_of, mutants)
    num_alive = 0
    for mutant in mutants:
        if arguments.only not in mutant.name:
            continue
        if mutant.test:
            is_caught = is_caught_by_test(mutant)
            num_alive += not is_caught
            print(f"{'caught' if is_caught else 'ALIVE '} by {mutant.test}  {mutant.name}", flush=True)
            continue
        num_seeds, how = seeds_to_catch(mutant)
        num_alive += num_seeds is None
        verdict = "ALIVE " if num_seeds is None else "caught"
        print(
            f"{verdict} {num_seeds or mutant.within:>5} of {mutant.within:>5} seeds  {mutant.name}: {how[:100]}",
            flush=True,
        )
    print(f"{num_alive} alive" if num_alive else "all caught")
    return 1 if num_alive else 0


if __name__ == "__main__":
    sys.exit(main())
