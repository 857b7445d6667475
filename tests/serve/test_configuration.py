"""Settings from a file, the environment and options: who wins, and what is said of what is wrong."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.settings_tables import PAGES, updated
from streamrag.errors import ConfigurationError
from streamrag.serve import Limits
from streamrag.serve.config.checks import check
from streamrag.serve.config.factories import name_on_ray
from streamrag.serve.config.layers import SECTIONS, load
from streamrag.serve.config.settings import CRAWL, HIDDEN, Settings, SourceSettings, commented_defaults, effective
from streamrag.sources.crawl.options import CrawlOptions


def file_of(folder: Path, text: str) -> Path:
    (folder / "service.toml").write_text(text)
    return folder / "service.toml"


def problems_of(file: Path | None, environment: dict[str, str], options: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in load(file, environment, options).problems]


def test_options_go_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = file_of(tmp_path, "[limits]\nmax_queries = 1\nmax_tokens = 1\nmax_sessions = 1\n")
    environment = {"STREAMRAG__LIMITS__MAX_TOKENS": "2", "STREAMRAG__LIMITS__MAX_SESSIONS": "2", "HOME": "/nowhere"}
    limits = load(file, environment, {"limits.max_sessions": "3"}).settings.limits
    assert (limits.max_queries, limits.max_tokens, limits.max_sessions) == (1, 2, 3)
    assert limits.drain_s == Settings().limits.drain_s


def test_lists_and_tables_are_read_from_texts_too() -> None:
    environment = {
        "STREAMRAG__SOURCE__URLS": "https://a.example, https://b.example",
        "STREAMRAG__ENGINE__ENGINE_ARGS": '{"enforce_eager": true}',
        "STREAMRAG__SOURCE__SITEMAPS": "true",
    }
    settings = load(None, environment, {"server.origins": ["https://c.example"]}).settings
    assert settings.source.urls == ("https://a.example", "https://b.example")
    assert settings.source.sitemaps
    assert settings.engine.engine_args == {"enforce_eager": True}
    assert settings.server.origins == ("https://c.example",)


def test_all_wrong_settings_are_named_at_once_each_with_its_place(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "[limits]\nmax_querys = 3\nmax_tokens = 0\n\n[limit]\nx = 1\n\n[server]\n# the port\nport = 'http'\n",
    )
    environment = {"STREAMRAG__SOURCE__K": "many", "STREAMRAG__SORCE__K": "1", "STREAMRAG__ENGINE__ENGINE_ARGS": "{"}
    found = problems_of(file, environment, {"answers.top_p": "2"})
    assert found == [
        f"{file}, line 5: there is no section [limit]. Did you mean limits?",
        "environment STREAMRAG__SORCE__K: there is no such setting. Did you mean STREAMRAG__SOURCE__?",
        "environment STREAMRAG__SOURCE__K: input should be a valid integer, unable to parse string as an integer, "
        "and is 'many'",
        "environment STREAMRAG__ENGINE__ENGINE_ARGS: is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1), and is '{'",
        "option --answers.top_p: input should be less than or equal to 1, and is '2'",
        f"{file}, line 3: limits.max_tokens: input should be greater than or equal to 1, and is '0'",
        f"{file}, line 2: limits.max_querys: [limits] has no max_querys. Did you mean max_queries?",
        f"{file}, line 10: server.port: input should be a valid integer, unable to parse string as an integer, "
        "and is 'http'",
    ]
    with pytest.raises(ConfigurationError, match=r"max_querys(.|\n)*server\.port"):
        _ = load(file, environment, {}).settings


def test_an_option_or_a_default_of_no_section_is_wrong_too() -> None:
    loaded = load(None, {}, {"limit.max_queries": "5", "port": "80"}, defaults={"sorce.k": 3})
    assert [str(problem) for problem in loaded.problems] == [
        "default sorce.k: there is no section [sorce]. Did you mean source?",
        "option --limit.max_queries: there is no section [limit]. Did you mean limits?",
        "option --port: there is no section [port]. Did you mean prompt?",
    ]
    with pytest.raises(ConfigurationError, match=r"no section \[limit\]"):
        _ = loaded.settings


def test_a_key_with_a_dot_and_one_without_a_name_are_wrong_and_end_no_check(tmp_path: Path) -> None:
    file = file_of(tmp_path, "[limits]\n'a.b' = 1\n[engine]\n'' = 1\n")
    loaded = load(file, {}, {"server.port": 0, "model": "x"})
    assert [str(problem).partition(". ")[0] for problem in check(loaded)] == [
        "option --model: [model] has no ",
        f"{file}, line 3: engine.: [engine] has no ",
        f"{file}: limits.a.b: [limits] has no a.b",
        "model.name: there is no model",
    ]


def test_a_start_address_that_is_not_fetched_hides_no_other_problem() -> None:
    loaded = load(None, {}, {"source.urls": "ftp://a.example", "server.port": 0, "prompt.passage": "{nonsense}"})
    assert [str(problem).partition(" is not fetched")[0].partition("=")[0] for problem in check(loaded)] == [
        "prompt: PromptTemplate.passage",
        "option --source.urls: 'ftp://a.example'",
        "model.name: there is no model. Name one, as --model ./Llama-3.1-8B-Instruct",
    ]


def test_a_missing_package_is_reported_at_the_setting_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object:
        if name == "opentelemetry.exporter.otlp.proto.http":
            raise ModuleNotFoundError(name)
        return None if name in ("vllm", "ray", "psycopg_pool") else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    options = {"replicas.sources": "1", "source.postgres": "postgresql://a", "observe.otel_endpoint": "http://a"}
    problems = check(load(None, {"STREAMRAG__MODEL__NAME": "org/model"}, {"server.port": 0, **options}))
    assert [(problem.where, problem.what) for problem in problems] == [
        ("option --source.postgres", "psycopg-pool is not installed"),
        ("option --replicas.sources", "ray is not installed"),
        ("option --observe.otel_endpoint", "opentelemetry-exporter-otlp-proto-http is not installed"),
        ("environment STREAMRAG__MODEL__NAME", "vllm is not installed"),
    ]


def test_a_right_setting_stands_though_another_in_its_section_is_wrong(tmp_path: Path) -> None:
    loaded = load(file_of(tmp_path, "[server]\nhost = '0.0.0.0'\nport = 'http'\n"), {}, {})
    assert loaded.sections["server"].host == "0.0.0.0"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits\n", r"is not TOML: .*line 1"),
        ("limits = 3\n", r"line 1: limits is a section: write \[limits\]"),
        ("max_queries = 3\n", r"line 1: there is no section \[max_queries\]"),
    ],
)
def test_a_file_that_is_no_configuration_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        _ = load(file_of(tmp_path, text), {}, {}).settings


def test_a_file_that_is_not_there_is_explained(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none.toml", {}, {}) == [
        f"{tmp_path}/none.toml: cannot be read: No such file or directory"
    ]


def test_no_secret_stands_in_a_message_or_in_what_holds() -> None:
    environment = {
        "STREAMRAG__KEYS__PAIRS": "alice=geheim-geheim-geheim",
        "STREAMRAG__MODEL__API_KEY": "geheim",
        "STREAMRAG__SOURCE__POSTGRES": "postgresql://me:geheim@host/database",
    }
    settings = load(None, environment, {}).settings
    assert settings.keys.pairs is not None
    shown = effective(settings)
    assert "geheim" not in shown + repr(settings)
    assert shown.count(HIDDEN) == 3
    wrong = load(None, {}, {"model.api_key": ["geheim"]})
    assert len(wrong.problems) == 1
    assert "geheim" not in str(wrong.problems[0])


def test_the_file_with_all_defaults_has_every_setting_and_changes_nothing(tmp_path: Path) -> None:
    text = commented_defaults()
    assert load(file_of(tmp_path, text), {}, {}).settings == Settings()
    for section, model in SECTIONS.items():
        part = text.partition(f"\n[{section}]\n")[2].partition("\n[")[0]
        for name, field in model.model_fields.items():
            assert f"\n# {field.description}\n" in f"\n{part}"
            assert f"\n{name} = " in part or f"\n# {name} =" in part


def test_effective_settings_are_read_back_unchanged(tmp_path: Path) -> None:
    options = {"prompt.system": 'Say "ja",\n\ttab, \\ and \x7f €.', "engine.engine_args": '{"a b": [1, {"c": "d"}]}'}
    settings = load(None, {}, options).settings
    file = file_of(tmp_path, effective(settings))
    assert load(file, {}, {}).settings == settings
    assert tomllib.loads(file.read_text())["engine"]["engine_args"] == {"a b": [1, {"c": "d"}]}


def test_the_documentation_has_every_setting_as_it_is() -> None:
    text = "".join(path.read_text() for path in PAGES)
    assert updated(text) == text, "run `make api`"
    for section, model in SECTIONS.items():
        part = text.partition(f"\n## `[{section}]`\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(model.model_fields), section


def test_paths_in_a_file_are_relative_to_it_and_names_stay_names(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "[source]\nindex = 'idx'\nembedder = './mine'\nrerank = 'late-interaction'\n"
        "[model]\nname = '../models/a'\ntokenizer = 'org/b'\n[engine]\nprofile = '/var/p.json'\n"
        "[keys]\nfile = '~/keys'\n",
    )
    settings = load(file, {"STREAMRAG__SOURCE__CACHE_FOLDER": "cache"}, {"source.trace": "t.jsonl"}).settings
    source, model = settings.source, settings.model
    assert (source.index, source.embedder, source.rerank) == (tmp_path / "idx", f"{tmp_path}/mine", "late-interaction")
    assert (model.name, model.tokenizer) == (f"{tmp_path.parent}/models/a", "org/b")
    assert (source.cache_folder, source.trace) == ("cache", Path("t.jsonl"))
    assert (settings.engine.profile, settings.keys.file) == ("/var/p.json", Path("~/keys").expanduser())


def test_true_is_no_number(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "[limits]\nmax_queries = true\ndrain_s = false\n[engine]\nkv_cache_bytes = true\nanswer_ahead = true\n",
    )
    assert problems_of(file, {}, {}) == [
        f"{file}, line 5: engine.kv_cache_bytes: must not be true or false, and is 'True'",
        f"{file}, line 2: limits.max_queries: must not be true or false, and is 'True'",
        f"{file}, line 3: limits.drain_s: must not be true or false, and is 'False'",
    ]
    with pytest.raises(ValueError, match="must not be true or false"):
        Limits(max_queries=True)


def test_settings_of_a_crawl_are_those_of_crawl_options(tmp_path: Path) -> None:
    fields = {name: SourceSettings.model_fields[name] for name in CRAWL}
    assert {name: field.default for name, field in fields.items()} == {
        name: getattr(CrawlOptions(), name) for name in CRAWL
    }
    assert fields["max_depth"].description == "links to follow from a start URL"
    assert all(field.description for field in fields.values())
    file = file_of(tmp_path, '[source]\nmax_depth = -1\ncdp_url = "localhost:9222"\n')
    assert problems_of(file, {}, {}) == [
        f"{file}, line 2: source.max_depth: input should be greater than or equal to 0, and is '-1'",
        f"{file}, line 3: source.cdp_url: must be the address of a browser's remote debugging port, such as "
        "http://127.0.0.1:9222, and is 'localhost:9222'",
    ]


def test_settings_stay_few() -> None:
    assert sum(len(section.model_fields) for section in SECTIONS.values()) <= 90


def test_services_on_one_cluster_have_engines_of_their_own() -> None:
    def named(**told: object) -> str:
        options = {f"replicas.{key}": value for key, value in told.items() if key != "port"}
        return name_on_ray(load(None, {}, {"server.port": told.get("port", 8080), **options}).settings)

    shared = {"address": "head:6379"}
    assert named(port=1, **shared) == named(port=1, **shared), "the same one takes over what it has left"
    assert (
        len({named(port=1, **shared), named(port=2, **shared), named(port=0, **shared), named(port=0, **shared)}) == 4
    )
    assert named(name="desk", **shared) == "desk"
