"""The demo's folder, which is made again when anything that it is made from has changed."""

from pathlib import Path

import pytest

from streamrag.demo import demo_folder


def test_a_demo_is_made_again_with_another_adapter_model_or_embedder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("build_site", "build_index", "make_demo_model"):
        monkeypatch.setattr(demo_folder, step, lambda *args, **options: 1)
    adapter = tmp_path / "adapter"
    adapter.write_bytes(b"one")
    monkeypatch.setattr(demo_folder, "TAUGHT", adapter)

    def is_made() -> list[bool]:
        return [demo_folder.prepare_demo(tmp_path / "demo") for _ in range(2)]

    assert is_made() == [True, False]
    adapter.write_bytes(b"two")
    assert is_made() == [True, False]
    monkeypatch.setattr(demo_folder, "GGUF_SHA256", "another")
    assert is_made() == [True, False]
    monkeypatch.setattr(demo_folder, "DEFAULT_EMBEDDER", "another")
    assert is_made() == [True, False]
