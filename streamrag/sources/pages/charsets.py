"""Text from the bytes of a page."""

import codecs
import re
from contextlib import suppress

BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
LATIN_1 = {"iso-8859-1", "latin-1", "latin1", "ascii", "us-ascii"}
NOT_OF_PAGES = {"idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"}
"""Python's codecs that are no charset of any page. Decoding punycode takes quadratic time."""


def decode(body: bytes, charset: str) -> str:
    """Decode a page in the charset that a byte order mark, the server or the page itself declares, or in a guess."""
    mark = next((name for mark, name in BYTE_ORDER_MARKS.items() if body.startswith(mark)), "")
    declared = re.search(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", body[:4096], re.IGNORECASE)
    for name in filter(None, (mark, charset.lower(), declared[1].decode().lower() if declared else "")):
        # Browsers read Latin-1 as the Windows code page that extends it, and so people write it.
        codec = "windows-1252" if name in LATIN_1 else name
        with suppress(LookupError, UnicodeError):
            if codecs.lookup(codec).name not in NOT_OF_PAGES:
                return body.decode(codec, errors="replace").removeprefix("\ufeff")
    with suppress(UnicodeError):
        return body.decode()
    return body.decode("windows-1252", errors="replace")
