"""Reading PDF files: the inside of a crawl worker.

Files are written by strangers. pypdf bounds what it decompresses, and the worker's own limits of time and memory hold
for the rest: a file that takes more costs its worker. Pages that are read in time are kept: after a part of it, no
further one is begun.
"""

import io
import logging
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from streamrag.sources.http.fetched import UnusablePageError

if TYPE_CHECKING:
    import pypdf

MAX_PDF_PAGES = 500

PDF_SHARE_OF_TIME = 0.6
"""Of the computing time for a page: then no further page of a PDF is begun."""

PARAGRAPH_CHARS = 400
"""A PDF has lines and no paragraphs: after so many characters, the next line that ends a sentence ends one."""

SENTENCE_END = (".", "!", "?", ":", "。", "！", "？")


class Document(NamedTuple):
    title: str
    text: str
    """Paragraphs with an empty line between them."""
    is_cut: bool
    """Whether there is more than was read."""


def read_pdf(body: bytes, *, max_chars: int, max_cpu_s: float) -> Document:
    """
    :raises UnusablePageError: it is encrypted, or damaged.
    """
    import pypdf  # a sixth of a second, in workers that read a PDF

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every flaw
    end_s = time.process_time() + PDF_SHARE_OF_TIME * max_cpu_s
    try:
        reader = pypdf.PdfReader(io.BytesIO(body), root_object_recovery_limit=1000)
        if reader.is_encrypted and not _decrypt(reader):
            raise UnusablePageError("it is a PDF that needs a password")
        title = _title(reader)
        paragraphs: list[str] = []
        num_chars = num_pages = num_unreadable = 0
        is_cut = False
        for page in reader.pages:
            if num_pages == MAX_PDF_PAGES or num_chars > max_chars or time.process_time() > end_s:
                is_cut = True
                break
            num_pages += 1
            try:
                text = page.extract_text()
            except MemoryError:
                raise
            except Exception:  # the other pages may be readable
                num_unreadable += 1
                continue
            for paragraph in _paragraphs(text[: max_chars + 1]):
                paragraphs.append(paragraph)
                num_chars += len(paragraph) + 2
    except (UnusablePageError, MemoryError):
        raise
    except Exception as error:  # its own errors, and whatever else damaged files bring about in it
        raise UnusablePageError(f"it is a damaged PDF: {type(error).__name__}: {error}"[:300]) from error
    if num_unreadable and num_unreadable == num_pages:
        raise UnusablePageError("it is a damaged PDF: none of its pages can be read")
    return Document(title, "\n\n".join(paragraphs), is_cut or bool(num_unreadable))


def _decrypt(reader: "pypdf.PdfReader") -> bool:
    """Many are encrypted with an empty password, against printing."""
    try:
        return bool(reader.decrypt(""))
    except Exception:  # of a cipher that is not installed, too
        return False


def _title(reader: "pypdf.PdfReader") -> str:
    try:
        return " ".join(str(reader.metadata.title or "").split()) if reader.metadata else ""
    except MemoryError:
        raise
    except Exception:  # the text may be readable
        return ""


def _paragraphs(text: str) -> list[str]:
    """In time proportional to the length of `text`."""
    text = text.encode(errors="replace").decode().replace("\x00", "")  # lone surrogates
    paragraphs: list[str] = []
    lines: list[str] = []
    num_chars = 0

    def close() -> None:
        nonlocal num_chars
        if lines:
            paragraphs.append(re.sub(r"(?<=[^\W\d_])-\n(?=[^\W\d_])", "", "\n".join(lines)))
            lines.clear()
            num_chars = 0

    for line in text.splitlines():
        line = line.strip()
        if line:
            lines.append(line)
            num_chars += len(line)
        if not line or (num_chars >= PARAGRAPH_CHARS and line.endswith(SENTENCE_END)):
            close()
    close()
    return paragraphs
