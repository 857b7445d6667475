"""Extraction of text from PDF files, which may be hostile.

pypdf bounds decompression; the worker's limits of time and memory bound the rest. Reading stops between two pages after
a share of the time, and the text so far is used.
"""

import asyncio
import io
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from unicodedata import normalize

from streamrag.errors import WorkerError
from streamrag.sources.workers.limits import job_limits
from streamrag.sources.workers.pool import WorkerJobError, WorkerLimitError, WorkerPool

if TYPE_CHECKING:
    import pypdf

MAX_FETCHED_PAGES = 500
MAX_FILE_PAGES, MAX_FILE_CHARS, MAX_FILE_CPU_S, MAX_FILE_BYTES = 2000, 5_000_000, 120.0, 1 << 30
"""Limits for a file that was not fetched but given: pages, characters, CPU seconds and bytes of memory."""
MAX_TITLE_CHARS = 300

PDF_SHARE_OF_TIME = 0.6  # share of the CPU limit after which reading stops
PARAGRAPH_CHARS = 400  # characters after which the end of a sentence ends a paragraph, as a PDF has only lines
LIGATURES = {0: "", **{code: normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}}
SENTENCE_END = (".", "!", "?", ":", "。", "！", "？")


class UnusablePdfError(Exception):
    """A PDF without usable text. It never leaves `sources`; its message is the reason."""


class PdfText(NamedTuple):
    """Title and text of a PDF."""

    title: str
    text: str  # paragraphs, separated by empty lines
    left_out: str  # the pages that are missing in the text, with the reason; empty if there are none


ReadPdf: TypeAlias = Callable[[bytes], PdfText]


@contextmanager
def pdf_worker() -> Iterator[ReadPdf]:
    """Yield a function that reads a PDF in a worker process, which runs from the first PDF to the end of the block.

    The function blocks the thread. It raises UnusablePdfError if the file is unusable, exceeds a limit or ends the
    worker.
    """
    with ExitStack() as stack:

        @cache
        def start() -> Callable[[bytes], dict[str, Any]]:
            limits = {"max_cpu_s": MAX_FILE_CPU_S, "max_bytes": MAX_FILE_BYTES}
            pool = WorkerPool(f"{__name__}:PdfReader", limits, size=1, name="PDF reading worker")
            runner = stack.enter_context(asyncio.Runner())
            runner.run(pool.start())
            stack.callback(lambda: runner.run(pool.aclose()))
            return lambda body: runner.run(pool.run({}, body))

        def read(body: bytes) -> PdfText:
            ask = start()
            try:
                return PdfText(**ask(body))
            except WorkerLimitError as error:
                limit = f"{MAX_FILE_BYTES >> 20} MiB" if error.what == "memory" else f"{MAX_FILE_CPU_S:g} s"
                raise UnusablePdfError(f"reading it takes more {error.what} than {limit}") from error
            except WorkerJobError as error:
                raise UnusablePdfError(error.message) from error
            except WorkerError as error:
                raise UnusablePdfError("the process that read it died") from error

        yield read


@dataclass
class PdfReader:
    """A handler of the jobs of `pdf_worker`."""

    max_cpu_s: float
    max_bytes: int

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        with job_limits(self.max_cpu_s, self.max_bytes):
            return read_pdf(
                body, max_chars=MAX_FILE_CHARS, max_cpu_s=self.max_cpu_s, max_pages=MAX_FILE_PAGES
            )._asdict()


def read_pdf(body: bytes, *, max_chars: int, max_cpu_s: float, max_pages: int = MAX_FETCHED_PAGES) -> PdfText:
    """Return the title and the text (or "") of a PDF, read up to the limits, and a note of the pages left out.

    :raises UnusablePdfError: the file is no PDF or damaged, or needs a password.
    """
    if b"%PDF-" not in body[:1024]:
        raise UnusablePdfError("it is no PDF")
    import pypdf  # takes a sixth of a second, so only in workers that read a PDF

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every flaw
    try:
        reader = pypdf.PdfReader(io.BytesIO(body), root_object_recovery_limit=1000)
        if reader.is_encrypted and not _decrypt(reader):
            raise UnusablePdfError("it is a PDF that needs a password")
        return PdfText(_title(reader), *_read_pages(reader, max_chars, PDF_SHARE_OF_TIME * max_cpu_s, max_pages))
    except (UnusablePdfError, MemoryError):
        raise
    except Exception as error:  # damaged files also cause errors that are not pypdf's own
        raise UnusablePdfError(f"it is a damaged PDF: {type(error).__name__}: {error}"[:300]) from error


def _read_pages(reader: "pypdf.PdfReader", max_chars: int, max_cpu_s: float, max_pages: int) -> tuple[str, str]:
    """Return the text of pages up to the first limit, and a note of those left out; UnusablePdfError if all damaged."""
    end_s = time.process_time() + max_cpu_s
    paragraphs: list[str] = []
    num_chars = num_pages = num_unreadable = 0
    left_out = ""
    for page in reader.pages:
        if num_pages == max_pages or num_chars > max_chars or time.process_time() > end_s:
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
        new = _paragraphs(text[: max_chars + 1])
        paragraphs += new
        num_chars += sum(len(paragraph) + 2 for paragraph in new)
    if num_unreadable and num_unreadable == num_pages:
        raise UnusablePdfError("it is a damaged PDF: none of its pages can be read")
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
    """Return the title in the metadata on one line, shortened; "" if there is none or it is damaged."""
    try:
        title = str(reader.metadata.title or "") if reader.metadata else ""
    except MemoryError:
        raise
    except Exception:  # the text may be readable
        return ""
    return " ".join(_clean(title).split())[:MAX_TITLE_CHARS]


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
