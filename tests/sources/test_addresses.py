import ipaddress

import pytest

from streamrag.errors import ConfigurationError, UnsafeUrlError
from streamrag.sources.http import ssrf_guard
from streamrag.sources.http.urls import normalize_url, parse_start_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://Example.COM", "http://example.com/"),
        ("HTTPS://example.com:443/a#b", "https://example.com/a"),
        ("http://example.com:80/?", "http://example.com/"),
        ("http://example.com:8080/", "http://example.com:8080/"),
        ("http://example.com/ä b?q=ü", "http://example.com/%C3%A4%20b?q=%C3%BC"),
        ("http://example.com/%7Ea%2Fb", "http://example.com/~a%2Fb"),
        ("http://example.com/%7eann/%41%2d%c3%a9?q=%7e%2f", "http://example.com/~ann/A-%C3%A9?q=~%2F"),
        ("\\docs\\page?a\\b#c", "http://base.example/docs/page?a%5Cb"),
        ("http:\\\\example.com\\a", "http://example.com/a"),
        ("https://good.example\\@evil.example/", "https://good.example/@evil.example/"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://[::1]:80/", "http://[::1]/"),
        ("http://example.com/a;b=1?c", "http://example.com/a;b=1?c"),
        ("../c?d#e", "http://base.example/c?d"),
        ("//other.example", "http://other.example/"),
        ("#top", "http://base.example/a/b"),
        (" http://example.com/\n", "http://example.com/"),
        ("http://example.com/a/../private/./x", "http://example.com/private/x"),
        ("http://example.com/a/%2E%2e/private/%2e", "http://example.com/private/"),
        ("http://example.com/../../..", "http://example.com/"),
        ("http://example.com//a//../b..c/...", "http://example.com//a/b..c/..."),
        ("/a/b/../%2e%2E/c?../x", "http://base.example/c?../x"),
        ("http://[v1.x]/", None),
        ("http://[fe80::1%25eth0]/", None),
        ("mailto:a@b.example", None),
        ("javascript:alert(1)", None),
        ("file:///etc/passwd", None),
        ("data:text/html,hello", None),
        ("http://a b/", None),
        ("http://example.com:99999/", None),
        ("http://example.com:x/", None),
        ("http://example.com:0/", None),
        ("http://[::1/", None),
        ("http://example.com/\ud800", None),
        ("http://example.com/?\ud800", None),
        ("http://\ud800.example/", None),
        ("http://me@example.com/", None),
        ("http://me:secret@example.com/", None),
        ("http://" + "x" * 70 + ".ö/", None),
        ("http://example.com/" + "x" * 2000, None),
    ],
)
def test_an_address_has_one_spelling(url: str, expected: str | None) -> None:
    actual = normalize_url(url, base="http://base.example/a/b")
    assert actual == expected
    assert expected is None or normalize_url(expected) == expected


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.com/", "raw:<p>hello", "javascript:alert(1)"])
def test_other_schemes_are_unsafe_to_start_from(url: str) -> None:
    with pytest.raises(UnsafeUrlError, match="only http:// and https:// addresses are"):
        parse_start_url(url)


MISTAKES = ["docs.example", "localhost:8000", "docs.example:80/a", "http://", "http://a:0/", "http://a:b@c.de/", 7]


@pytest.mark.parametrize("url", MISTAKES)
def test_a_start_url_that_is_no_address_is_a_mistake(url: object) -> None:
    with pytest.raises(ConfigurationError, match=r"write https://host/path|is a str"):
        parse_start_url(url)


@pytest.mark.parametrize("address", ["8.8.8.8", "::ffff:8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert ssrf_guard.is_public(ipaddress.ip_address(address))


def test_an_address_of_any_length_is_refused_before_it_is_looked_at() -> None:
    assert normalize_url("http://docs.example/" + "a" * 1980) is not None
    for url in ("http://docs.example/" + "a" * 1981, "../" * 1000, "http://" + "ü" * 1_000_000):
        assert normalize_url(url, "http://docs.example/") is None
