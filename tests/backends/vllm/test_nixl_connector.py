"""KV that a decode lane reads too late is not used."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from streamrag.backends.vllm import VllmBackend, nixl_connector
from streamrag.backends.vllm.client.lane_engine import READ_BY_KEY
from streamrag.backends.vllm.nixl_connector import NixlConnector

KV_TRANSFER = {
    "remote_block_ids": ([1],),
    "remote_engine_id": "prefill",
    "remote_request_id": "1",
    "remote_host": "localhost",
    "remote_port": 1,
}


def test_vllm_takes_our_connector_for_a_decode_lane_alone() -> None:
    def connector_class(lane: Any) -> type:
        config = VllmBackend("model", lane=lane)._engine_args["kv_transfer_config"]
        return KVConnectorFactory.get_connector_class(KVTransferConfig(**config))

    assert connector_class("decode") is NixlConnector
    assert connector_class("prefill") is NixlConnector.__base__


def test_reads_that_ended_too_late_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_connector, "seconds_since_boot", lambda: 100.0)
    metadata = NixlConnectorMetadata()
    for name, read_by_s in {"in time": 100.5, "late": 99.5, "no time": None, "not done": 99.5}.items():
        metadata.add_new_req_to_recv(name, ([1],), {**KV_TRANSFER, READ_BY_KEY: read_by_s})
    reads = metadata.reqs_to_recv

    def end_reads() -> KVConnectorTransferResults:
        names = {"in time", "late", "no time"}
        for name in names:
            del reads[name]
        return KVConnectorTransferResults(finished_recving=names)

    connector = object.__new__(NixlConnector)
    connector.connector_worker = SimpleNamespace(_recving_metadata=reads, get_transfer_results=end_reads)
    connector.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer")
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"in time", "late", "no time"}
    assert results.failed_recving == {"late", "no time"}
