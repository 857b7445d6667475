"""Extraction of text from PDF files, which may be hostile.

pypdf bounds decompression; the worker's limits of time and memory bound the rest. Reading stops between two pages after
a share of the time, and the text so far is used.
"""

import io
import logging
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from streamrag.sources.http.page import UnusablePageError

if TYPE_CHECKING:
    import pypdf

MAX_PDF_PAGES = 500

PDF_SHARE_OF_TIME = 0.6  # share of the CPU limit after which reading stops
PARAGRAPH_CHARS = 400  # characters after which the end of a sentence ends a paragraph, as a PDF has only lines
SENTENCE_END = (".", "!", "?", ":", "。", "！", "？")


class PdfText(NamedTuple):
    title: str
    text: str  # paragraphs, separated by empty lines
    is_cut: bool  # whether the text is incomplete


def read_pdf(body: bytes, *, max_chars: int, max_cpu_s: float) -> PdfText:
    """Extract the title and the text of a PDF. Raises UnusablePageError if the file is encrypted or damaged."""
    import pypdf  # takes a sixth of a second, so only in workers that read a PDF

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every flaw
    try:
        reader = pypdf.PdfReader(io.BytesIO(body), root_object_recovery_limit=1000)
        if reader.is_encrypted and not _decrypt(reader):
            raise UnusablePageError("it is a PDF that needs a password")
        return PdfText(_title(reader), *_read_pages(reader, max_chars, PDF_SHARE_OF_TIME * max_cpu_s))
    except (UnusablePageError, MemoryError):
        raise
    except Exception as error:  # damaged files also cause errors that are not pypdf's own
        raise UnusablePageError(f"it is a damaged PDF: {type(error).__name__}: {error}"[:300]) from error


def _read_pages(reader: "pypdf.PdfReader", max_chars: int, max_cpu_s: float) -> tuple[str, bool]:
    """Return the text within the limits, and whether it lacks pages; raise UnusablePageError if no page is readable."""
    end_s = time.process_time() + max_cpu_s
    paragraphs: list[str] = []
    num_chars = num_pages = num_unreadable = 0
    is_cut = False
    for page in reader.pages:
        is_cut = num_pages == MAX_PDF_PAGES or num_chars > max_chars or time.process_time() > end_s
        if is_cut:
            break
        num_pages += 1
        try:
            text = page.extract_text()
        except MemoryError:
            raise
        except Exception:  # the other pages may be readable
            num_unreadable += 1
            continue
        new = _paragraphs(text[: max_chars + 1])
        paragraphs += new
        num_chars += sum(len(paragraph) + 2 for paragraph in new)
    if num_unreadable and num_unreadable == num_pages:
        raise UnusablePageError("it is a damaged PDF: none of its pages can be read")
    return "\n\n".join(paragraphs), is_cut or bool(num_unreadable)


def _decrypt(reader: "pypdf.PdfReader") -> bool:
    """Whether the empty password decrypts the file: many files are encrypted only against printing."""
    try:
        return bool(reader.decrypt(""))
    except Exception:  # such as a cipher that is not installed
        return False


def _title(reader: "pypdf.PdfReader") -> str:
    try:
        return str(reader.metadata.title or "") if reader.metadata else ""
    except MemoryError:
        raise
    except Exception:  # the text may be readable
        return ""


def _paragraphs(text: str) -> list[str]:
    """Split text at empty lines and, in long paragraphs, at sentence ends; join hyphenated words. Takes linear time."""
    text = text.encode(errors="replace").decode().replace("\x00", "")  # lone surrogates
    paragraphs: list[list[str]] = [[]]
    num_chars = 0
    for line in map(str.strip, text.splitlines()):
        if line:
            paragraphs[-1].append(line)
            num_chars += len(line)
        if not line or (num_chars >= PARAGRAPH_CHARS and line.endswith(SENTENCE_END)):
            paragraphs.append([])
            num_chars = 0
    return [re.sub(r"(?<=[^\W\d_])-\n(?=[^\W\d_])", "", "\n".join(lines)) for lines in paragraphs if lines]
