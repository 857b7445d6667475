"""Rerankers as a worker has them. Models are made here, small and of random weights, but of the real classes."""

import sys
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.sources.index.embedder import ModelPlace, find_embedder
from streamrag.sources.search.reranker import RerankerHandler, RerankerPlace, find_reranker

TOY = ModelPlace("toy_embedder:embed", "toy_embedder:embed", {})
TEXTS = ["Brake pads are worn out when the grooves are gone.", "A starter is flour and water.", ""]
QUERY = "When do I have to change the brake pads of my bike?"


def made(place: RerankerPlace) -> Any:
    handle = RerankerHandler(kind=place.kind, location=place.location, reranker=place.name)

    def do(what: str, **fields: Any) -> Any:
        return handle({"do": what, **fields}, b"")

    return do


def make_cross_encoder(folder: Path, *, num_labels: int = 1) -> Path:
    """A cross-encoder of one layer whose weights differ enough for different scores.

    Of the packaged embedder it has only the tokenizer.
    """
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=num_labels, initializer_range=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoTokenizer.from_pretrained(find_embedder("all-MiniLM-L6-v2").location).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cannot be reached."""

    def ask(self: HfApi, name: str, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", ask)


def test_late_interaction_scores_what_the_query_is_about_higher() -> None:
    reranker = made(find_reranker("late-interaction", find_embedder("all-MiniLM-L6-v2")))
    assert len(reranker("load")["scores"]) == 2
    about, other, empty = reranker("score", query=QUERY, texts=TEXTS)["scores"]
    assert 1 >= about > other > empty == -1
    assert reranker("score", query=TEXTS[1], texts=[TEXTS[1]])["scores"] == pytest.approx([1])
    alone = [reranker("score", query=QUERY, texts=[text])["scores"][0] for text in TEXTS]
    assert alone == pytest.approx([about, other, empty], abs=1e-4)  # neighbours in a batch make no difference
    assert reranker("score", query="", texts=TEXTS)["scores"] == [0, 0, 0]
    (long,) = reranker("score", query="word " * 10_000, texts=["text " * 10_000])["scores"]
    assert -1 <= long <= 1
    halves = reranker("score", query="brake \ud800 pads", texts=[TEXTS[0] + "\udfff"])
    assert halves == reranker("score", query="brake \ufffd pads", texts=[TEXTS[0] + "\ufffd"])


def test_a_cross_encoder_is_loaded_by_its_path(tmp_path: Path) -> None:
    place = find_reranker(str(make_cross_encoder(tmp_path / "cross")), TOY)
    assert (place.kind, place.env["HF_HUB_OFFLINE"]) == ("cross-encoder", "1")
    reranker = made(place)
    scores = reranker("score", query=QUERY, texts=TEXTS)["scores"]
    assert min(abs(a - b) for a, b in combinations(scores, 2)) > 1e-3
    assert reranker("score", query=QUERY, texts=TEXTS[1:])["scores"] == pytest.approx(scores[1:], abs=1e-4)


def test_a_model_that_gives_several_scores_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    reranker = made(find_reranker(str(make_cross_encoder(tmp_path / "cross", num_labels=3)), TOY))
    with pytest.raises(ConfigurationError, match=r"reranker='\S*cross' failed: TypeError"):
        reranker("load")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy_reranker:too_few", r"gave \[1.0\] for 2 passages"),
        ("toy_reranker:not_numbers", r"gave \[nan, nan\] for 2 passages"),
        ("toy_reranker:failing", "failed: LookupError: no scores today"),
        ("toy_reranker:none", "cannot be loaded: AttributeError"),
        ("no_such_module:rerank", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_functions_that_are_no_rerankers_are_refused_when_they_are_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"reranker='{name}' {message}"):
        made(find_reranker(name, TOY))("load")


def test_a_folder_without_a_model_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        made(find_reranker(str(tmp_path), TOY))("load")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "it names nothing"),
        ("late interaction", "there is no such folder. Name 'late-interaction', a sentence-transformers CrossEncoder"),
        ("/no/such/model", "there is no such folder"),
        ("./model", "there is no such folder"),
        ("late-interaction", "embedder='toy_embedder:embed' is a function, which gives none"),
    ],
)
def test_names_that_name_nothing_are_refused_before_anything_is_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_reranker(name, TOY)


def test_a_name_is_one_of_the_hub() -> None:
    place = find_reranker("someone/some-model", TOY)
    assert (place.kind, place.location, "HF_HUB_OFFLINE" in place.env) == ("cross-encoder", "someone/some-model", False)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        find_reranker("late-interaction", TOY)
    assert find_reranker("toy_reranker:backwards", TOY).kind == "function"


@pytest.mark.parametrize("name", ["late_interaction", "someone/no-such-model"])
@pytest.mark.usefixtures("no_hub")
def test_a_model_that_is_nowhere_is_refused_before_anything_is_imported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # importing it would fail otherwise
    place = RerankerPlace(name, name, {}, "cross-encoder")
    with pytest.raises(ConfigurationError, match=r"not downloaded .* \(no route to host\). Name 'late-int"):
        made(place)("load")


@pytest.mark.usefixtures("no_hub")
def test_a_downloaded_model_is_loaded_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache, with a model that it had given before."""
    snapshot = tmp_path / "models--someone--cross" / "snapshots" / ("0" * 40)
    make_cross_encoder(snapshot)
    (tmp_path / "models--someone--cross" / "refs").mkdir()
    (tmp_path / "models--someone--cross" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path))
    assert len(made(RerankerPlace("someone/cross", "someone/cross", {}, "cross-encoder"))("load")["scores"]) == 2
