"""The demo's folder, which is made again when anything that it is made from has changed."""

from pathlib import Path

import pytest

from streamrag.demo import demo_folder
from streamrag.errors import ConfigurationError


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


def test_a_folder_that_is_not_the_demos_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("build_site", "build_index", "make_demo_model"):
        monkeypatch.setattr(demo_folder, step, lambda *args, **options: 1)
    (tmp_path / "index").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigurationError, match=r"index was not made for the demo.*name another folder"):
        demo_folder.prepare_demo(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "letter.txt"]
    (tmp_path / "index").rmdir()
    assert demo_folder.prepare_demo(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_demo_whose_making_failed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("build_site", "build_index", "make_demo_model"):
        monkeypatch.setattr(
            demo_folder, step, lambda folder, *args, **options: (tmp_path / "demo" / "index").mkdir(exist_ok=True)
        )
    monkeypatch.setattr(demo_folder, "make_demo_model", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo_folder.prepare_demo(tmp_path / "demo")
    monkeypatch.setattr(demo_folder, "make_demo_model", lambda *args, **options: None)
    assert demo_folder.prepare_demo(tmp_path / "demo")
