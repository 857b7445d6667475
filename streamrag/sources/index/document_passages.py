"""Find text, Markdown, HTML and PDF documents in a folder, read them, and split them into passages.

folder ──find_documents──▶ paths ──read_documents──▶ Documents
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from streamrag.core.text import CJK, heading_path, split_markdown
from streamrag.errors import ConfigurationError, require_modules
from streamrag.sources.documents.charsets import marked_encoding
from streamrag.sources.documents.reader import NEEDED, Content, Read, UnreadableError
from streamrag.support.bounded_reading import open_regular

OnProgress: TypeAlias = Callable[[int, int, str], None]
"""A callback with the number of finished items, the number of all items, and the step."""
KINDS = {
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".pdf": "pdf",
}
"""The kind of a document, by the suffix of its name."""
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|[^\w\s]")
"""A run of letters and digits, a CJK character, or a sign: each begins a new piece of a wordpiece tokenizer."""
MAX_HEADINGS = 6
"""Most headings above a passage that it repeats: the innermost."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file's title and its passages, in order."""

    uri: str
    """Path within the folder, with slashes."""
    title: str
    passages: list[str]
    left_out: str = ""
    """The missing part, with the reason; empty if the file was read whole."""


def find_documents(
    folder: Path, *, max_file_bytes: int, leave_out: Path | None = None
) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files to read below `folder`, sorted by path, and the skipped paths within it, each with the reason.

    A path is skipped as `reason_to_skip` says, and a folder also if it cannot be read; nothing below it is listed.

    :raises ConfigurationError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder: name the folder that holds the documents")
    files, skipped = [], []
    pending = [folder]
    while pending:
        path = pending.pop()
        reason = None if path == folder else reason_to_skip(path, max_file_bytes, leave_out)
        if reason:
            skipped.append((relative_name(path, folder), reason))
        elif not path.is_dir():
            files.append(path)
        else:
            try:
                pending.extend(sorted(path.iterdir(), reverse=True))
            except OSError as error:
                skipped.append((relative_name(path, folder), f"cannot be read: {error.strerror}"))
    return files, skipped


def reason_to_skip(path: Path, max_file_bytes: int, leave_out: Path | None) -> str | None:
    """Return why this path is skipped: hidden, a symbolic link, `leave_out`, of another type, too large; else None."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():  # a target within the folder is read by itself; this way there are no loops
        return "symbolic link"
    if path.is_dir():
        return "is the index" if path == leave_out else None
    if not path.is_file():
        return "not a regular file"
    if path.suffix.lower() not in KINDS:
        return "not text, Markdown, HTML or PDF by its name"
    num_bytes = path.stat().st_size
    return f"{num_bytes} bytes, more than {max_file_bytes}" if num_bytes > max_file_bytes else None


def relative_name(path: Path, folder: Path) -> str:
    """Return the path within the folder, with slashes, and with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "replace")


def nothing_to_index(folder: Path | str, skipped: Iterable[tuple[str, str]]) -> ConfigurationError:
    """Return the error for a folder or file without passages, which counts the skipped files by reason."""
    counts = Counter(reason for _, reason in sorted(skipped))
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return ConfigurationError(
        f"{folder} holds no text, Markdown, HTML or PDF to index (skipped: {reasons or 'nothing'})"
    )


def read_documents(
    folder: Path,
    paths: list[Path],
    skipped: list[tuple[str, str]],
    passage_words: int,
    report: Callable[[int], None],
    read: Read,
) -> Iterator[Document]:
    """Yield the document in each file. Add to `skipped` each unreadable file with the reason, and each that is read in
    part.

    report: called before each file with the number of files before it.

    :raises MissingDependencyError: a package that one of the files needs is not installed.
    """
    for kind in NEEDED.keys() & {KINDS[path.suffix.lower()] for path in paths}:
        require_modules(*NEEDED[kind])
    for number, path in enumerate(paths):
        report(number)
        try:
            document = read_document(path, folder, passage_words, read)
        except UnreadableError as error:
            skipped.append((relative_name(path, folder), str(error)))
        else:
            if document.left_out:
                skipped.append((document.uri, document.left_out))
            yield document


def read_document(path: Path, folder: Path, passage_words: int, read: Read) -> Document:
    """Return the document in a file, titled by its title, else first heading, else file name.

    Raises UnreadableError for a file that cannot be read or decoded, is a symbolic link, or has no text.
    """
    try:
        with open_regular(path) as file:
            body = file.read()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    kind = KINDS[path.suffix.lower()]
    if kind != "pdf" and not marked_encoding(body) and b"\0" in body[:8192]:
        raise UnreadableError("binary")
    if kind in ("text", "markdown"):
        try:
            body.decode(marked_encoding(body) or "utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableError(f"not UTF-8: byte {error.start} does not decode") from error
    content = read(body, kind)
    uri = relative_name(path, folder)
    passages = split_content(content, passage_words)
    if not passages:
        raise UnreadableError("no text in it")
    return Document(uri, content.title or PurePosixPath(uri).stem, passages, content.left_out)


def split_content(content: Content, passage_words: int) -> list[str]:
    """Return passages of about `passage_words` words or fewer.

    Each passage begins with the headings above it that the title does not contain. Passages do not overlap: overlapping
    neighbours would compete for the k nearest, and be prefilled twice.
    """
    passages = split_markdown(
        content.text, least=passage_words // 3, enough=passage_words, most=passage_words, count=count_words
    )
    return ["\n\n".join((*_repeated(passage.headings, content.title), *passage.blocks)) for passage in passages]


def _repeated(headings: Sequence[str], title: str) -> list[str]:
    """Return the line of the innermost headings that a document's title does not have, if there are any."""
    repeated = [heading for heading in headings if heading_path([heading]) not in title][-MAX_HEADINGS:]
    return [heading_path(repeated)] if repeated else []


def count_words(text: str) -> int:
    """Return the number of words, signs and CJK characters, which is close to the number of word pieces.

    >>> count_words("asyncio.run() は 2 つ")
    8
    """
    return sum(1 for _ in WORD.finditer(text))
