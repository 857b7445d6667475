"""Decode the bytes of web pages and documents, as browsers do.

Source: https://encoding.spec.whatwg.org, whose table of labels says, for instance, that `gb2312` is GB 18030.
"""

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress

from streamrag.support.bounded_reading import MARKS

NUM_DECLARING_BYTES = 4096  # bytes at the beginning in which a declaration is looked for; browsers read 1024
CODECS = {"gbk": "gb18030", "iso-2022-jp": "iso2022_jp_ext"}
"""Python's codecs for encodings of which its codec of the same name lacks characters. For the others, webencodings
has them."""
DECLARED = {"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}
"""Encodings that mean another one in a declaration, which would not have been found in UTF-16."""

VENDOR_CODECS = {"euc_jp": "cp932", "big5hkscs": "cp950"}
"""Python's codecs that lack characters of Windows, which browsers have, and the codecs of Windows."""
MAX_ERRORS = 100_000  # bytes that such a codec cannot decode before the end of a text is left out; they take 10 µs each

_META = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_XML = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)")
_CODE_PAGE = re.compile(r"(cp|ms)\d{3,5}")
_NOT_SUPPORTED = "replacement"  # encodings that browsers refuse because of scripts, of which we run none


def decode(body: bytes, charset: str = "", *, is_markup: bool = True) -> str:
    """Return the text of a page or file, without a byte order mark; invalid bytes become U+FFFD.

    The byte order mark counts first, then `charset`, the server's label, then the declarations in HTML or XML. Without
    a known one, the text is UTF-8, or Windows-1252 if it cannot be.
    """
    for label in _labels(body, charset, is_markup):
        if codec := _codec(label):
            errors = _vendor_characters() if codec.name in VENDOR_CODECS else "replace"
            return codec.decode(body, errors)[0].removeprefix("\ufeff")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("windows-1252", "replace")


def marked_encoding(body: bytes) -> str:
    """Return the encoding that the byte order mark says, or ""."""
    return next((name for mark, name in MARKS.items() if body.startswith(mark)), "")


def _labels(body: bytes, charset: str, is_markup: bool) -> Iterator[str]:
    """Yield the labels that the mark, the server, and if it is markup the text itself gives, the first one first."""
    yield from (marked_encoding(body), charset)
    if body.startswith((b"<\0?\0", b"\0<\0?")):  # XML in UTF-16 without a mark
        yield "utf-16le" if body.startswith(b"<") else "utf-16be"
    elif is_markup:
        import webencodings

        for label in _declared_labels(body[:NUM_DECLARING_BYTES]):
            encoding = webencodings.lookup(label)
            yield DECLARED.get(encoding.name, label) if encoding else label


def _declared_labels(beginning: bytes) -> Iterator[str]:
    """Yield the labels of `meta` elements, then that of an XML declaration."""
    from lxml import etree

    document = etree.fromstring(b"<html>" + beginning, etree.HTMLParser(encoding="iso-8859-1"))
    for meta in document.iter("meta"):
        is_type = meta.get("http-equiv", "").strip().lower() == "content-type"
        found = _META.search(meta.get("content", "")) if is_type else None
        yield meta.get("charset") or (found[1] if found else "")
    if declaration := _XML.match(beginning):
        yield declaration[1].decode("ascii", "replace")


def _codec(label: str) -> codecs.CodecInfo | None:
    """Return the codec for a label, or None: not all of Python's codecs are charsets, and some take quadratic time."""
    import webencodings

    label = label.strip().lower()
    encoding = webencodings.lookup(label)
    try:
        if encoding and encoding.name != _NOT_SUPPORTED:
            return codecs.lookup(CODECS[encoding.name]) if encoding.name in CODECS else encoding.codec_info
        return codecs.lookup(label) if encoding or _CODE_PAGE.fullmatch(label) else None
    except LookupError:
        return None


def _vendor_characters() -> str:
    """Register a handler of decoding errors that knows the characters of Windows, for one text, and return its name."""
    num_errors = 0

    def replace_error(error: UnicodeError) -> tuple[str, int]:
        nonlocal num_errors
        assert isinstance(error, UnicodeDecodeError)
        num_errors += 1
        if num_errors > MAX_ERRORS:
            return "", len(error.object)
        pair = error.object[error.start : error.start + 2]
        if len(pair) == 2 and min(pair) > 0xA0:
            if error.encoding == "euc_jp":  # Shift_JIS has the same table, of 94 rows and columns
                row, column = (byte - 0xA1 for byte in pair)
                trail = column + 0x9F if row % 2 else column + 0x40 + (column > 62)
                pair = bytes((row // 2 + (0x81 if row < 62 else 0xC1), trail))
            with suppress(UnicodeDecodeError):
                return pair.decode(VENDOR_CODECS[error.encoding]), error.start + 2
        return "\ufffd", error.end

    codecs.register_error("streamrag.vendor_characters", replace_error)
    return "streamrag.vendor_characters"
