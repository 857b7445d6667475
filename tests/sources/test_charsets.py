"""Which letters the bytes of pages and files are. The right texts are those that browsers show."""

import time

import pytest

from streamrag.sources.documents.charsets import decode


@pytest.mark.parametrize(
    ("text", "encoding", "label"),
    [
        ("朱镕基", "gb18030", "gb2312"),
        ("朱镕基㐀", "gb18030", "GBK"),
        ("髙島屋①", "cp932", "x-sjis"),
        ("髙島屋①", "cp932", "Shift_JIS"),
        ("뷁똠", "cp949", "ks_c_5601-1987"),
        ("뷁똠", "cp949", "cp949"),
        ("嗰個", "big5hkscs", "big5"),
        ("①日本", "euc_jis_2004", "euc-jp"),
        ("ｱﾆﾒ", "iso2022_jp_ext", "iso-2022-jp"),
        ("한글", "iso2022_kr", "iso-2022-kr"),
        ("“naïve” €", "cp1252", "iso-8859-1"),
        ("İŞ “x”", "cp1254", "iso-8859-9"),
        ("Привет", "koi8-u", "koi8-ru"),
        ("ไทย", "cp874", "tis-620"),
        ("naïve", "utf-16-le", "utf-16"),
        ("naïve", "utf-8", "unicode-1-1-utf-8"),
        ("naïve", "utf-8", " UTF8 "),
    ],
)
def test_a_label_means_what_it_means_to_browsers(text: str, encoding: str, label: str) -> None:
    assert decode(text.encode(encoding), label) == text


@pytest.mark.parametrize(
    ("body", "label", "text"),
    [
        (b"\xfc\xe2\xc5\xe7\xad\xea\xf9\xa1", "euc-jp", "髙島㈱纊"),
        (b"\xa3\xe15 \xad\xbb\xb4\xe4", "big5", "€5 香港"),
        (b"\xfca\xf5\xf5\xfc", "euc-jp", "\ufffda\ufffd\ufffd\ufffd"),
    ],
)
def test_a_character_of_windows_that_python_s_codec_lacks_is_read(body: bytes, label: str, text: str) -> None:
    assert decode(body, label) == text


@pytest.mark.parametrize(
    ("body", "charset", "expected"),
    [
        (b'<?xml version="1.0" encoding="euc-jp"?><p>' + "日本".encode("euc-jp"), "", "日本"),
        ("<?xml version='1.0' encoding='utf-16'?><p>é".encode("utf-16-le"), "", "é"),
        (b'<meta charset="utf-16"><p>' + "é".encode(), "", "é"),
        (b"<!-- <meta charset=gbk> --><META CHARSET=utf-8>" + "é".encode(), "", "é"),
        (b"<meta http-equiv=Content-Type content='text/html; charset=windows-1251'>" + b"\xcf", "", "П"),
        (b"<meta charset=windows-1251>" + "é".encode(), "utf-8", "é"),
        (b"<meta charset=windows-1251>" + b"\xcf", "no such", "П"),
        (b"<meta charset=nothing>" + "é".encode(), "", "é"),
        (b"<meta charset=nothing><meta charset=windows-1251>" + b"\xcf", "", "П"),
        (b"<meta name=description content='write charset=koi8-r'>" + "é".encode(), "", "é"),
        (b"<meta content='a > b; charset=windows-1251' http-equiv=content-type>" + b"\xcf", "", "П"),
        (b"<script>'<meta charset=koi8-r>'</script><meta charset=windows-1251>" + b"\xcf", "", "П"),
        (b"<meta charset=ucs-2>" + "é".encode(), "", "é"),
        (b"<meta charset=x-user-defined>" + b"\xe9", "", "é"),
        (b"\xe9", "", "é"),
        (b"\xe9", "punycode", "é"),
    ],
)
def test_the_server_s_label_counts_before_the_page_s_own_declaration(body: bytes, charset: str, expected: str) -> None:
    assert decode(body, charset).endswith(expected)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_counts_before_everything_else(encoding: str) -> None:
    assert decode("<meta charset=gbk>é".encode(encoding), "latin-1") == "<meta charset=gbk>é"


def test_plain_text_declares_no_charset() -> None:
    assert decode("Write <meta charset=koi8-r>: é".encode(), is_markup=False) == "Write <meta charset=koi8-r>: é"


def test_a_bad_byte_spoils_only_itself() -> None:
    assert decode(b"\xd6\xec\xff\xbb\xf9", "gb2312").startswith("朱\ufffd")


def test_declarations_without_end_and_bad_bytes_take_little_time() -> None:
    start_s = time.process_time()
    decode(b"<meta " * 1_000_000)
    decode(b"<!--" * 1_000_000)
    decode(b"<?xml " + b" " * 5_000_000)
    decode(b"\xfc\xe2" * 2_000_000, "euc-jp")
    decode(b"\xff" * 4_000_000, "big5")
    assert time.process_time() - start_s < 5
