"""Extraction of text from PDF files, which may be hostile.

pypdf bounds decompression; the worker's limits of time and memory bound the rest. Reading stops between two pages after
a share of the time, and the text so far is used.
"""

import io
import logging
import re
import time
from typing import TYPE_CHECKING
from unicodedata import normalize

from streamrag.sources.documents.reader import Content, ReadingLimits, UnreadableError

if TYPE_CHECKING:
    import pypdf

PDF_SHARE_OF_TIME = 0.6  # share of the CPU limit after which reading stops
PARAGRAPH_CHARS = 400  # characters after which the end of a sentence ends a paragraph, as a PDF has only lines
LIGATURES = {0: "", **{code: normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}}
SENTENCE_END = (".", "!", "?", ":", "。", "！", "？")


def read_pdf(body: bytes, limits: ReadingLimits) -> Content:
    """Return the title and the paragraphs of a PDF, read up to the limits, and a note of the pages left out.

    :raises UnreadableError: the file is no PDF or damaged, or needs a password.
    """
    if b"%PDF-" not in body[:1024]:
        raise UnreadableError("it is no PDF")
    import pypdf  # takes a sixth of a second, so only in workers that read a PDF

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every flaw
    try:
        reader = pypdf.PdfReader(io.BytesIO(body), root_object_recovery_limit=1000)
        if reader.is_encrypted and not _decrypt(reader):
            raise UnreadableError("it is a PDF that needs a password")
        return Content(_title(reader), *_read_pages(reader, limits))
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # damaged files also cause errors that are not pypdf's own
        raise UnreadableError(f"it is a damaged PDF: {type(error).__name__}: {error}"[:300]) from error


def _read_pages(reader: "pypdf.PdfReader", limits: ReadingLimits) -> tuple[str, str]:
    """Return the text of pages up to the first limit, and a note of those left out; UnreadableError if all damaged."""
    end_s = time.process_time() + PDF_SHARE_OF_TIME * limits.max_cpu_s
    paragraphs: list[str] = []
    num_chars = num_pages = num_unreadable = 0
    left_out = ""
    for page in reader.pages:
        if num_pages == limits.max_pdf_pages or num_chars > limits.max_chars or time.process_time() > end_s:
            left_out = f"all after page {num_pages:,}, because it is too long"
            break
        num_pages += 1
        try:
            text = page.extract_text()
        except MemoryError:
            raise
        except Exception:  # the other pages may be readable
            num_unreadable += 1
            continue
        new = _paragraphs(text[: limits.max_chars + 1])
        paragraphs += new
        num_chars += sum(len(paragraph) + 2 for paragraph in new)
    if num_unreadable and num_unreadable == num_pages:
        raise UnreadableError("it is a damaged PDF: none of its pages can be read")
    if num_unreadable and not left_out:
        left_out = f"damaged pages: {num_unreadable}"
    return "\n\n".join(paragraphs), left_out


def _decrypt(reader: "pypdf.PdfReader") -> bool:
    """Whether the empty password decrypts the file: many files are encrypted only against printing."""
    try:
        return bool(reader.decrypt(""))
    except Exception:  # such as a cipher that is not installed
        return False


def _title(reader: "pypdf.PdfReader") -> str:
    """Return the title in the metadata; "" if there is none or it is damaged."""
    try:
        return _clean(str(reader.metadata.title or "")) if reader.metadata else ""
    except MemoryError:
        raise
    except Exception:  # the text may be readable
        return ""


def _paragraphs(text: str) -> list[str]:
    """Split a page's text at empty lines and, from 400 characters, at sentence ends; join words broken at hyphens."""
    paragraphs: list[list[str]] = [[]]
    num_chars = 0
    for line in map(str.strip, _clean(text).splitlines()):
        if line:
            paragraphs[-1].append(line)
            num_chars += len(line)
        if not line or (num_chars >= PARAGRAPH_CHARS and line.endswith(SENTENCE_END)):
            paragraphs.append([])
            num_chars = 0
    return [re.sub(r"(?<=[^\W\d_])[-\u2010\xad]\n(?=[^\W\d_])", "", "\n".join(lines)) for lines in paragraphs if lines]


def _clean(text: str) -> str:
    """Replace lone surrogates and ligatures of Latin letters, and remove null characters."""
    return text.encode(errors="replace").decode().translate(LIGATURES)
