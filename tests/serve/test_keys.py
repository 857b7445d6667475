"""API keys: where they come from, and what is wrong with some."""

import os
from pathlib import Path

import pytest

from streamrag.errors import ConfigurationError
from streamrag.serve.config.checks import check
from streamrag.serve.config.keys import read_keys
from streamrag.serve.config.layers import load
from streamrag.serve.config.settings import KeySettings
from streamrag.serve.server import listen

ALICE, BOB = "a" * 32, "b" * 32


def file_of(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = file_of(tmp_path, f'alice = "{ALICE}"\n')
    assert read_keys(KeySettings(file=file, pairs=f"bob={BOB}")) == {ALICE: "alice", BOB: "bob"}
    assert read_keys(KeySettings()) == {}


def test_a_file_may_have_the_keys_of_ten_thousand_clients(tmp_path: Path) -> None:
    lines = (f'"client {number} of a company with a long name" = "{number:064}"\n' for number in range(10_000))
    assert len(read_keys(KeySettings(file=file_of(tmp_path, "".join(lines))))) == 10_000


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f'alice = "{ALICE}"', 0o640, "can be read by others than its owner: chmod 600"),
        (f'alice = "{ALICE}"', 0o604, "can be read by others"),
        ("", 0o600, "has no keys"),
        ('alice = "geheim"', 0o600, "the key of 'alice' must have at least 16"),
        ('alice = "geheim geheim geheim"', 0o600, "the key of 'alice' must"),
        ('alice = "geheimgeheimgeheimé"', 0o600, "the key of 'alice' must"),
        (f'alice = "{ALICE}"\nbob = "{ALICE}"', 0o600, "'alice' and 'bob' have the same key"),
        ("alice = 7", 0o600, "'alice' must be a string"),
        ("geheim", 0o600, "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained_without_a_key(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        read_keys(KeySettings(file=file_of(tmp_path, text, mode)))
    assert "geheim" not in str(raised.value)
    assert ALICE not in str(raised.value)


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000])
def test_a_file_that_no_parser_bears_is_explained(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_keys(KeySettings(file=file_of(tmp_path, f"alice = {value}")))
    (tmp_path / "service.toml").write_text(f"[engine]\nengine_args = {{ a = {value} }}\n")
    environment = {"STREAMRAG__ENGINE__ENGINE_ARGS": value}
    problems = [str(each) for each in load(tmp_path / "service.toml", environment, {}).problems]
    assert len(problems) == 2
    assert "is not TOML" in problems[0]


def test_an_address_that_is_none_is_explained() -> None:
    for host in ("\0", "x" * 300):
        with pytest.raises(ConfigurationError, match="cannot listen on"):
            listen(host, 0)


def test_a_file_that_is_not_there_and_a_pair_that_is_none_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"keys\.toml cannot be read: No such file"):
        read_keys(KeySettings(file=tmp_path / "keys.toml"))
    with pytest.raises(ConfigurationError, match=r"pair 2 of keys\.pairs is not name=key"):
        read_keys(KeySettings(pairs=f"alice={ALICE} geheim"))


@pytest.mark.parametrize("pairs", ["", " \n"])
def test_an_empty_list_of_keys_is_a_configuration_error(pairs: str) -> None:
    with pytest.raises(ConfigurationError, match=r"keys\.pairs has no keys"):
        read_keys(KeySettings(pairs=pairs))
    environment = {"STREAMRAG__KEYS__PAIRS": pairs, "STREAMRAG__SERVER__HOST": "0.0.0.0"}
    assert any("keys.pairs has no keys" in str(each) for each in check(load(None, environment, {})))


def test_a_group_may_read_what_root_hands_to_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_keys(KeySettings(file=file_of(tmp_path, f'alice = "{ALICE}"', 0o440))) == {ALICE: "alice"}
    for mode in (0o460, 0o444):
        with pytest.raises(ConfigurationError, match="can be read by others"):
            read_keys(KeySettings(file=file_of(tmp_path, f'alice = "{ALICE}"', mode)))
