"""Make text safe to show in a terminal, on a page, in a picture. Others wrote much of it.

A terminal obeys control characters, and some invisible ones change the order of what stands beside them. None of them
reaches a reader as it is.
"""

import json
import re
from typing import Any

MAX_IN_PICTURE = 120
"""Characters of one text; a picture would grow with it."""

# C0 but tab and newline, DEL, C1, line and paragraph separators, what turns the direction around, lone surrogates.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
# The other characters of Unicode's category "format" that cannot be seen: joiners, marks of direction, tags and so on.
_INVISIBLE = (
    "\xad\u061c\u180e\u200b-\u200f\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
)
_REPLACED, _REMOVED = re.compile(f"[{_OBEYED}]"), re.compile(f"[{_INVISIBLE}]+")
_UNSAFE = re.compile(f"[{_OBEYED}{_INVISIBLE}]")


def sanitize(text: str) -> str:
    """Return `text` as a terminal prints it and does not obey it; tabs and newlines stay.

    What would be obeyed becomes U+FFFD; what cannot be seen is left out.
    """
    return _REMOVED.sub("", _REPLACED.sub("\N{REPLACEMENT CHARACTER}", text))


def one_line(text: str) -> str:
    """Return `text` made safe, in one line."""
    return sanitize(text).replace("\n", " ").replace("\t", " ")


def excerpt(text: object, max_chars: int = 300) -> str:
    """Return the beginning of what someone else says, such as a server, for one line of a message."""
    return one_line(str(text)[: 2 * max_chars])[:max_chars].strip()


def for_picture(text: str) -> str:
    """Return a line for matplotlib, which takes what stands between dollar signs for a formula."""
    line = one_line(text)
    line = line if len(line) <= MAX_IN_PICTURE else f"{line[:MAX_IN_PICTURE]}…"
    return line.replace("$", r"\$")


def json_text(values: Any, *, only_ascii: bool = False) -> str:
    """Return `values` as indented JSON, in which nothing is lost: what is not shown stands as an escape."""
    return _UNSAFE.sub(_escaped, json.dumps(values, indent=2, ensure_ascii=only_ascii))


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]
