"""What of vLLM the streaming scheduler relies on, by name and by its source.

vLLM calls all of this internal. When it changes, the test that names it fails: read the change, adapt, and put the new
fingerprint into `CHANGES` (`python -m tests.backends.vllm.test_surface` prints what differs from this file).
"""

import ast
import hashlib
import importlib
import inspect
import json
import textwrap

import pytest

from streamrag.backends.vllm.version import DISTRIBUTIONS, SUPPORTED, series_of
from streamrag.support.versions import installed_versions

SURFACE = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "3d1ad516a1a9",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": "64743aaff91f",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "7e6c8d9dfe0a",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "e3a4efe6c229",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "122f133d2c7d",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "705a2a007fec",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "ef52e4b25c2c",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks": "e98d9868afc8",
    "vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed": "d8ac449f3728",
    "vllm.v1.core.sched.scheduler:Scheduler._drain_deferred_frees": "557dac6fbad8",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": "777a0bcefb1f",
    "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request": "949e0931e972",
    "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": "fb0503bafa90",
    "vllm.v1.core.sched.scheduler:Scheduler._holds_kv_blocks": "63aa8d0c9805",
    "vllm.v1.core.sched.scheduler:Scheduler._is_blocked_waiting_status": "d414e0599027",
    "vllm.v1.core.sched.scheduler:Scheduler._enqueue_waiting_request": "87f895908880",
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": "1cadd7bc8441",
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state": "79eca7fd7e35",
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": "ac2cc40960e9",
    "vllm.v1.core.sched.scheduler:Scheduler.has_finished_requests": "3467d6d1291a",
    "vllm.v1.core.sched.scheduler:Scheduler.get_num_unfinished_requests": "9918abee8694",
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts": "8b520ad4566b",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": "705f13b1c84c",
    "vllm.v1.metrics.loggers:StatLoggerManager": "98ba64fa5a58",
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": "de409328c3ad",
    "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": "62a184795c80",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "982782e24412",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output": "c7be84b0f306",
    "vllm.v1.core.sched.utils:check_stop": "8fd4a1dd39aa",
    "vllm.v1.core.sched.utils:remove_all": "721c81a62e99",
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue": "b346008adf8e",
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls": "d01d76a0f5e8",
    "vllm.v1.core.sched.output:SchedulerOutput": "8ade424cbd0b",
    "vllm.v1.core.sched.output:NewRequestData.from_request": "b6913a7ffe79",
    "vllm.v1.core.sched.output:CachedRequestData": "ba7c79ba9221",
    "vllm.v1.request:Request": "edbbc34369a8",
    "vllm.v1.request:RequestStatus": "fb83829cef84",
    "vllm.v1.engine:EngineCoreOutput": "a45266b69d2f",
    "vllm.v1.engine:EngineCoreOutputs": "3426f577d4d4",
    "vllm.v1.engine:FinishReason": "5e1bbf4a918a",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "00230aa0d0f6",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "0188bbc45e25",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": "597fa0f496bd",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": "4790e8b6a439",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks": "9191dcbd1c14",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate": "4278d63f7fdf",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": "294a2eb0fcfb",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free": "e3dacd529c42",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks": "91a5dba46223",
    "vllm.v1.core.block_pool:BlockPool.is_block_writable": "7b038e005a83",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "6644c0be8fd3",
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": "d57e464beb12",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "de1e3e8b42dd",
    "vllm.v1.core.block_pool:BlockPool.touch": "9b2bd2b42fe4",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "0f3938274139",
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": "31ee03315ca7",
    "vllm.v1.engine.core:EngineCore.step": "6813317ebca3",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": "1cb40476607c",
    "vllm.v1.engine.core:EngineCore.add_request": "6eb546efcd38",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": "346a0114fef7",
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler": "f7a1a7258321",
    "vllm.v1.engine.core:EngineCoreProc.has_work": "ddb2e91e8d21",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "9bfa21cf59c4",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_streaming_request": "259c68c237c9",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests": "100396685ae2",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests": "f2b1e4a347c9",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests": "b357a72a245c",
    "vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request": "6188c4df0919",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "ba5c58eb57b3",
    "vllm.v1.engine.output_processor:OutputProcessor._update_streaming_request_state": "1ad3cb35a1c6",
    "vllm.v1.core.sched.scheduler:Scheduler._handle_invalid_blocks": "8aaa5295b7ab",
    "vllm.v1.core.sched.scheduler:Scheduler._build_kv_connector_meta": "e0c952aafb6d",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "5595793c83c6",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": "abd354279358",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": "4e2fa1ea0ee7",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": "4b0fc9dc5c4c",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "251949378c17",
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin": "80c9cbaee51c",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector": "48ff8dd378e1",
    "vllm._custom_ops:swap_blocks": "edb9ffa20c17",
    "vllm.v1.engine.output_processor:RequestOutputCollector": "7f15d67bffa1",
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": "324f02d97138",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": "2eb8e87acb10",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor": "33d2abe6d4fb",
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": "dbbce3babb09",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": "6928ce6c9df0",
    "vllm.v1.engine.core_client:BackgroundResources": "0cb544b19fc1",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "82c970246f57",
    "vllm.v1.metrics.loggers:StatLoggerBase": "9279065577d0",
    "vllm.v1.kv_cache_interface:group_kernel_blocks": "7065b0d8547c",
    "vllm.v1.simple_kv_offload.cuda_mem_ops:pin_tensor": "69ca761bb75c",
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats": "1aa649c3e1f5",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": "80edbbb8acda",
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": "b1e403fca99b",
    "vllm.v1.worker.gpu_input_batch:InputBatch.update_req_spec_token_ids": "d32203755892",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata": "909b5316ef9b",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "2ba033e60fa7",
    "vllm.utils.cpu_triton_utils:_expand_kernel_impl": "0dff9a5154b8",  # if it changes: StepPlanner._can_verify_drafts
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": "41fff10b7298",
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager": "8d831892d81a",
    "vllm.v1.worker.mamba_utils:preprocess_mamba": "db0bd6e4b593",
    "vllm.v1.worker.mamba_utils:cleanup_mamba_state_idx": "6199f07bb648",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.add_request": "3d2ef6f49c42",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.new_step_starts": "4a760d9c37bf",
}

"""Fingerprints for the oldest series, by name."""

CHANGES: dict[str, dict[str, str | None]] = {
    "0.33": {
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": "a06fe15f3877",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "d8742484f7e4",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "86a181d2629f",
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "5231edf038f7",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request": "c8bb7e4808a0",
        "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request": "7508863afc33",
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": "5be501b57a33",
        "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": "c9be162d9851",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output": None,
        "vllm.v1.core.sched.output:SchedulerOutput": "c8274b158e2f",
        "vllm.v1.engine:EngineCoreOutput": "9079686f55e0",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "7f9db39c12b9",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": "b5ac0bb13a90",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free": "b008aa5256e3",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "542e366ba81c",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": "47a332f43aba",
        "vllm.v1.core.block_pool:BlockPool.touch": "d32cef0e56cf",
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher": "7a9548178637",
        "vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request": "34901557d9be",
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "6755c4a75cb0",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "7a34b81f4fb3",
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector": "2cb112c08612",
        "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": "557a3fd3db82",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": "0f494d60dc81",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor": "f18dc0b967d6",
        "vllm.v1.engine.output_processor:StreamingInputOutputCollector": "7b6f7915bc84",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor._start_workers_concurrently": "ba4e81f37b8b",
        "vllm.v1.engine.core:EngineCoreProc._reject_add_while_paused": "2a6c7e2b5b5e",
        "vllm.v1.engine.core_client:BackgroundResources": "5e46b5a07ec4",
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "08c4010106f5",
        "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": "c99536d21684",
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager": "12c09b7dbf4f",
    },
}
"""Fingerprints that differ from those of the series before; None where there is no such name any more."""


def expected_surface(series: str) -> dict[str, str]:
    """Fingerprints of all names that this series has."""
    surface: dict[str, str | None] = dict(SURFACE)
    for each in SUPPORTED[: SUPPORTED.index(series) + 1]:
        surface |= CHANGES.get(each, {})
    return {name: value for name, value in surface.items() if value}


EXPECTED = expected_surface(series_of(next(iter(installed_versions(*DISTRIBUTIONS).values()))))


def fingerprint(name: str) -> str:
    """Fingerprint of the code of a function or class, without its comments, docstrings and layout."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_part_of_vllm_that_we_rely_on_is_unchanged(name: str) -> None:
    assert fingerprint(name) == EXPECTED[name]


def differences() -> dict[str, str | None]:
    """Fingerprints that this file does not expect; None where a name is gone."""
    found: dict[str, str | None] = {}
    for name in EXPECTED:
        try:
            found[name] = fingerprint(name)
        except AttributeError:
            found[name] = None
    return {name: value for name, value in found.items() if value != EXPECTED[name]}


if __name__ == "__main__":
    for each, value in differences().items():
        print(f'        "{each}": {json.dumps(value)},'.replace("null", "None"))
