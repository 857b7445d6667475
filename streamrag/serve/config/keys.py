"""API keys, and the names of those who have them: from a file that only its owner reads, or from the environment."""

import os
import stat
import tomllib
from pathlib import Path

from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import KeySettings

MIN_KEY_CHARACTERS = 16


def read_keys(told: KeySettings) -> dict[str, str]:
    """Names of clients, by key; none if there are no keys.

    :raises ConfigurationError: a file that others can read, or that cannot be read; a key that is too short, or twice
        there. No message holds a key.
    """
    pairs: list[tuple[str, str]] = []
    if told.file is not None:
        pairs += _of_file(told.file)
        if not pairs:
            raise ConfigurationError(f'{told.file} has no keys: write lines as name = "key"')
    if told.pairs is not None:
        given = told.pairs.get_secret_value().split()
        if not given:  # as where a variable that should hold them is empty: nobody meant to let everybody in
            raise ConfigurationError("keys.pairs has no keys: write name=key, or leave it out")
        for number, pair in enumerate(given, 1):
            name, is_pair, key = pair.partition("=")
            if not is_pair or not name:
                raise ConfigurationError(f"pair {number} of keys.pairs is not name=key")
            pairs.append((name, key))
    names: dict[str, str] = {}
    for name, key in pairs:
        if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigurationError(
                f"the key of {name!r:.80} must have at least {MIN_KEY_CHARACTERS} letters, digits or signs of ASCII: "
                "`openssl rand -hex 32` makes one"
            )
        if key in names:
            raise ConfigurationError(f"{names[key]!r:.80} and {name!r:.80} have the same key: give each one its own")
        names[key] = name
    return names


def _of_file(file: Path) -> list[tuple[str, str]]:
    try:
        with file.open("rb") as opened:
            if _is_open_to_others(os.fstat(opened.fileno())):
                raise ConfigurationError(f"{file} can be read by others than its owner: chmod 600 {file}")
            values = tomllib.load(opened)
    except ConfigurationError:  # which is a ValueError
        raise
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:  # says a line and a column, not what stands there
        raise ConfigurationError(f'{file} is no TOML, as name = "key": {error}') from None
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, deep arrays
        raise ConfigurationError(f'{file} is no TOML, as name = "key"') from None
    for name, key in values.items():
        if not isinstance(key, str):
            raise ConfigurationError(f'{file}: {name!r:.80} must be a text, as name = "key"')
    return list(values.items())


def _is_open_to_others(status: os.stat_result) -> bool:
    """A group may read what belongs to another user, such as root: so are secrets handed to a service."""
    for_group = stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP | stat.S_IXGRP
    return bool(status.st_mode & (for_group | stat.S_IRWXO))
