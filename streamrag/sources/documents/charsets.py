"""Decode the bytes of web pages and documents, as browsers do.

Source: https://encoding.spec.whatwg.org, whose table of labels says, for instance, that `gb2312` is GB 18030.
"""

import codecs
import re

from streamrag.support.bounded_reading import MARKS

NUM_DECLARING_BYTES = 4096  # bytes at the beginning in which a declaration is looked for; browsers read 1024
CODECS = {"gbk": "gb18030", "euc-jp": "euc_jis_2004", "iso-2022-jp": "iso2022_jp_ext"}
"""Python's codecs for encodings of which its codec of the same name lacks characters. For the others, webencodings
has them."""

_COMMENT = re.compile(rb"<!--.*?(-->|\Z)", re.DOTALL)
_META = re.compile(rb"<meta[\s/][^>]*?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_XML = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)")
_CODE_PAGE = re.compile(r"(cp|ms)\d{3,5}")
_NOT_SUPPORTED = "replacement"  # encodings that browsers refuse because of scripts, of which we run none


def decode(body: bytes, charset: str = "") -> str:
    """Return the text of a page or file, without a byte order mark; invalid bytes become U+FFFD.

    The byte order mark counts first, then `charset`, the server's label, then the declaration in HTML or XML. Without
    a known one, the text is UTF-8, or Windows-1252 if it cannot be.
    """
    for label in (marked_encoding(body), charset, _declared_label(body[:NUM_DECLARING_BYTES])):
        if codec := _codec(label):
            return codec.decode(body, "replace")[0].removeprefix("\ufeff")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("windows-1252", "replace")


def marked_encoding(body: bytes) -> str:
    """Return the encoding that the byte order mark says, or ""."""
    return next((name for mark, name in MARKS.items() if body.startswith(mark)), "")


def _declared_label(beginning: bytes) -> str:
    """Return the label in the first `meta` with a charset, or in an XML declaration; "" if there is none."""
    if beginning.startswith((b"<\0?\0", b"\0<\0?")):  # XML in UTF-16 without a mark
        return "utf-16le" if beginning.startswith(b"<") else "utf-16be"
    found = _META.search(_COMMENT.sub(b"", beginning)) or _XML.match(beginning)
    label = found[1].decode("ascii", "replace").lower() if found else ""
    return "utf-8" if label.startswith("utf-16") else label  # in UTF-16, it would not have been found


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
