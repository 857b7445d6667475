"""PDF files, good and hostile."""

import io
import zlib
from collections.abc import Callable

import fpdf
import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, NameObject, NumberObject

from streamrag.sources.documents import file_worker as file_worker_module
from streamrag.sources.documents.file_worker import LIMITS, file_worker
from streamrag.sources.documents.pdf import _paragraphs, read_pdf
from streamrag.sources.documents.reader import Content, ReadingLimits, UnreadableError

SENTENCE = "Penguins swim with their wings, and steer with their feet. "


def pdf(*pages: str, title: str = "Penguins") -> bytes:
    document = fpdf.FPDF()
    document.set_title(title)
    document.set_font("helvetica", size=11)
    for page in pages:
        document.add_page()
        document.multi_cell(0, 6, page)
    return bytes(document.output())


def read(body: bytes, **limits: float) -> Content:
    return read_pdf(body, ReadingLimits(**{"max_cpu_s": 30.0, "max_chars": 100_000, **limits}))  # type: ignore[arg-type]


def changed(body: bytes, change: Callable[[pypdf.PdfWriter], object]) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(body))
    change(writer)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


def test_title_and_text_of_all_pages_are_read() -> None:
    document = read(pdf("The first page. " + SENTENCE * 20, "The second page."))
    assert document.title == "Penguins"
    paragraphs = document.text.split("\n\n")
    assert paragraphs[0].startswith("The first page. Penguins swim")
    assert paragraphs[-1] == "The second page."
    assert len(paragraphs) == 3
    assert document.left_out == ""


def test_words_that_are_broken_at_the_end_of_a_line_are_whole() -> None:
    assert (
        read(pdf("Penguins are swim-\nming birds of 2020-\n2024.")).text
        == "Penguins are swimming birds of 2020-\n2024."
    )


def test_ligatures_and_soft_hyphens_of_a_pdf_are_letters_and_whole_words() -> None:
    assert _paragraphs("misﬁts and eﬄuents\nReise\xad\nkosten and Reise\u2010\nzeit") == [
        "misfits and effluents\nReisekosten and Reisezeit"
    ]


def test_text_pages_and_time_are_bounded_and_what_was_read_is_kept() -> None:
    pages = [f"Page {number}. " + SENTENCE * 5 for number in range(12)]
    short = read(pdf(*pages), max_chars=700)
    assert short.left_out == "all after page 3, because it is too long"
    assert "Page 1." in short.text
    assert "Page 5." not in short.text
    out_of_time = read(pdf(*pages), max_cpu_s=0.0)
    assert out_of_time == Content("Penguins", "", "all after page 0, because it is too long")
    few = read(pdf(*pages), max_pdf_pages=2)
    assert few.left_out == "all after page 2, because it is too long"
    assert "Page 1." in few.text
    assert "Page 2." not in few.text


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_encryption_with_an_empty_password_is_none_and_any_other_is_refused(algorithm: str) -> None:
    body = pdf("Penguins swim.")
    assert read(changed(body, lambda writer: writer.encrypt("", "owner", algorithm=algorithm))).text == "Penguins swim."
    with pytest.raises(UnreadableError, match="it is a PDF that needs a password"):
        read(changed(body, lambda writer: writer.encrypt("secret", algorithm=algorithm)))


def test_a_damaged_file_is_refused_or_read_as_far_as_it_goes() -> None:
    """Cut anywhere, with bytes turned anywhere: nothing else ever comes out than a document or an UnreadableError."""
    body = pdf("Penguins swim.", SENTENCE * 9)
    num_refused = 0
    for number in range(0, len(body), len(body) // 60):
        for damaged in (body[:number], body[:number] + bytes(9) + body[number + 9 :], body[number:]):
            try:
                assert isinstance(read(damaged), Content)
            except UnreadableError:
                num_refused += 1
    assert num_refused > 30
    for text in (b"", b"%PDF", b"%PDF-1.7\n%%EOF", b"<html>", b"%PDF-1.7\n" + b"[" * 100_000):
        with pytest.raises(
            UnreadableError, match="it is a damaged PDF" if text.startswith(b"%PDF-") else "it is no PDF"
        ):
            read(text)


def test_a_title_that_leads_round_in_a_circle_is_none_and_the_text_is_read() -> None:
    def turn_round(writer: pypdf.PdfWriter) -> None:
        title = writer._add_object(NumberObject(0))
        writer._objects[title.idnum - 1] = title
        writer._info[NameObject("/Title")] = title  # type: ignore[index]

    assert read(changed(pdf("Penguins swim."), turn_round)) == Content("", "Penguins swim.", "")


def with_content(content: bytes, num_deflated: int = 1) -> bytes:
    """A file whose page draws `content`, compressed so many times."""

    def put(writer: pypdf.PdfWriter) -> None:
        stream = DecodedStreamObject()
        body = content
        for _ in range(num_deflated):
            body = zlib.compress(body, 9)
        stream.set_data(body)
        filters = pypdf.generic.ArrayObject([NameObject("/FlateDecode")] * num_deflated)
        stream[NameObject("/Filter")] = filters
        writer.pages[0][NameObject("/Contents")] = writer._add_object(stream)

    return changed(pdf("x"), put)


@pytest.mark.parametrize("num_deflated", [1, 2, 3])
def test_a_decompression_bomb_is_refused(num_deflated: int) -> None:
    bomb = with_content(bytes(80 << 20), num_deflated)
    assert len(bomb) < 1 << 20
    with pytest.raises(UnreadableError, match="none of its pages can be read"):
        read(bomb)


def test_a_page_tree_that_is_a_circle_ends() -> None:
    def turn_round(writer: pypdf.PdfWriter) -> None:
        tree = writer._root_object["/Pages"]
        tree.get_object()["/Kids"].append(writer._root_object.raw_get("/Pages"))  # type: ignore[union-attr,index]
        tree.get_object()[NameObject("/Count")] = NumberObject(1_000_000_000)  # type: ignore[index]

    with pytest.raises(UnreadableError, match="it is a damaged PDF"):
        read(changed(pdf("x"), turn_round))


# ---------------------------------------------------------------------------------------------- files of a folder


def endless_content() -> bytes:
    """A page whose content takes pypdf minutes: a form that draws itself by many names."""
    return with_content(b"BT /F1 9 Tf (x) Tj ET " * 3_000_000)


def test_a_worker_reads_files_one_after_another_and_says_why_one_has_no_text() -> None:
    with file_worker() as read_file:
        for body, reason in (
            (b"<html>", "it is no PDF"),
            (changed(pdf("x"), lambda writer: writer.encrypt("secret")), "it is a PDF that needs a password"),
            (with_content(bytes(80 << 20)), "none of its pages can be read"),
        ):
            with pytest.raises(UnreadableError, match=reason):
                read_file(body, "pdf")
        swim = pdf("Penguins swim.", title=" of  the\nsea ")
        assert read_file(swim, "pdf") == Content("of the sea", "Penguins swim.", "")


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("LIMITS", LIMITS._replace(max_cpu_s=0.5), "reading it takes more computing time than 0.5 s"),
        ("MAX_BYTES", 32 << 20, "reading it takes more memory than 32 MiB"),
    ],
)
def test_a_file_that_takes_too_much_is_refused_and_the_next_one_is_read(
    limit: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = endless_content()
    monkeypatch.setattr(file_worker_module, limit, value)
    with file_worker() as read_file:
        with pytest.raises(UnreadableError, match=reason):
            read_file(body, "pdf")
        assert read_file(pdf("Penguins swim."), "pdf").text == "Penguins swim."
