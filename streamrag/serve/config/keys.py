"""API keys and their clients' names, from a file that only its owner can read, or from the environment."""

import os
import stat
import tomllib
from pathlib import Path

from streamrag.errors import ConfigurationError
from streamrag.serve.config.settings import KeySettings

MIN_KEY_CHARACTERS = 16


def read_keys(settings: KeySettings) -> dict[str, str]:
    """Return client names by key, from the file and the pairs; empty if neither is set.

    Raises ConfigurationError, without any key in its message, if a key is short, used twice, or not printable ASCII
    without spaces, if a pair is not name=key, or if the file or the pairs have no keys.
    """
    pairs: list[tuple[str, str]] = []
    if settings.file is not None:
        pairs += _read_file(settings.file)
        if not pairs:
            raise ConfigurationError(f'{settings.file} has no keys: write lines as name = "key"')
    if settings.pairs is not None:
        words = settings.pairs.get_secret_value().split()
        if not words:  # an empty variable must not disable authentication
            raise ConfigurationError("keys.pairs has no keys: write name=key, or leave it out")
        for number, pair in enumerate(words, 1):
            name, is_pair, key = pair.partition("=")
            if not is_pair or not name:
                raise ConfigurationError(f"pair {number} of keys.pairs is not name=key")
            pairs.append((name, key))
    names: dict[str, str] = {}
    for name, key in pairs:
        if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigurationError(
                f"the key of {name!r:.80} must have at least {MIN_KEY_CHARACTERS} printable ASCII characters and no "
                "spaces: `openssl rand -hex 32` makes one"
            )
        if key in names:
            raise ConfigurationError(f"{names[key]!r:.80} and {name!r:.80} have the same key: give each one its own")
        names[key] = name
    return names


def _read_file(file: Path) -> list[tuple[str, str]]:
    """Return the names and keys of a TOML file; raise ConfigurationError if others may read it, or it is invalid."""
    try:
        with file.open("rb") as opened:
            if _is_open_to_others(os.fstat(opened.fileno())):
                raise ConfigurationError(f"{file} can be read by others than its owner: chmod 600 {file}")
            values = tomllib.load(opened)
    except ConfigurationError:  # a subclass of ValueError
        raise
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:  # its message has a line and a column, but no content
        raise ConfigurationError(f'{file} is not TOML, as name = "key": {error}') from None
    except (ValueError, RecursionError):  # invalid UTF-8, numbers of thousands of digits, deep arrays
        raise ConfigurationError(f'{file} is not TOML, as name = "key"') from None
    for name, key in values.items():
        if not isinstance(key, str):
            raise ConfigurationError(f'{file}: {name!r:.80} must be a string, as name = "key"')
    return list(values.items())


def _is_open_to_others(status: os.stat_result) -> bool:
    """Whether users other than the owner can read a file. If it belongs to another user, such as root, its group may:
    secrets are mounted that way."""
    for_group = stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP | stat.S_IXGRP
    return bool(status.st_mode & (for_group | stat.S_IRWXO))
