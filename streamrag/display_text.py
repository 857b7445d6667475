"""Make untrusted text safe to show in a terminal or on a page.

Terminals interpret control characters, and some invisible characters reorder the text around them.
"""

import json
import re
from typing import Any

# C0 but tab and newline, DEL, C1, line and paragraph separators, direction overrides, lone surrogates.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
# The other invisible characters of Unicode's category "format": joiners, direction marks, tags and so on.
_INVISIBLE = (
    "\xad\u061c\u180e\u200b-\u200f\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
)
_REPLACED, _REMOVED = re.compile(f"[{_CONTROLS}]"), re.compile(f"[{_INVISIBLE}]+")
_UNSAFE = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")


def sanitize(text: str) -> str:
    """Replace control characters by U+FFFD and remove invisible ones; tabs and newlines stay."""
    return _REMOVED.sub("", _REPLACED.sub("\N{REPLACEMENT CHARACTER}", text))


def one_line(text: str) -> str:
    """Return `text` sanitized, with spaces for tabs and newlines."""
    return sanitize(text).replace("\n", " ").replace("\t", " ")


def excerpt(text: object, max_chars: int = 300) -> str:
    """Return the beginning of an untrusted text, such as a server's message, on one safe line."""
    return one_line(str(text)[: 2 * max_chars])[:max_chars].strip()


def json_text(values: Any, *, only_ascii: bool = False) -> str:
    """Return `values` as indented JSON, with unsafe characters escaped, so that nothing is lost."""
    return _UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], json.dumps(values, indent=2, ensure_ascii=only_ascii))
