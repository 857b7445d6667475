"""Normalized URLs of web pages."""

import re
from urllib.parse import quote, urljoin, urlsplit

from streamrag.errors import ConfigurationError, UnsafeUrlError

MAX_URL_CHARS = 2000
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")


def normalize_url(url: str, base: str = "") -> str | None:
    """Return `url`, resolved against `base` and normalized, without fragment; None if it is not a web page's URL.

    Such a URL is http or https, has no user name, and at most `MAX_URL_CHARS`. As in browsers, a backslash in its path
    is a slash.
    """
    if len(url := url.strip()) > MAX_URL_CHARS:
        return None
    path, *rest = re.split(r"([?#])", url, maxsplit=1)
    try:
        parts = urlsplit(urljoin(base, "".join((path.replace("\\", "/"), *rest))))
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
        path = _remove_dot_segments(_normalize_escapes(quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")))
        query = "?" + _normalize_escapes(quote(parts.query, safe="/%:@!$&'()*+,;=~?")) if parts.query else ""
    except ValueError:  # includes UnicodeError for a lone surrogate
        return None
    if port == 0 or parts.scheme not in ("http", "https") or parts.username is not None or parts.password is not None:
        return None
    is_ipv6 = "[" in parts.netloc  # without zones and IPvFuture
    if not re.fullmatch(r"[0-9a-f:.]+" if is_ipv6 else r"[a-z0-9._-]+", host):
        return None
    host = f"[{host}]" if is_ipv6 else host
    if port is not None and port != {"http": 80, "https": 443}[parts.scheme]:
        host += f":{port}"
    normalized = f"{parts.scheme}://{host}{path}{query}"
    return normalized if len(normalized) <= MAX_URL_CHARS else None


def _normalize_escapes(text: str) -> str:
    """Decode escapes of unreserved characters, such as `%7E` for `~`, and write others in capitals.

    Source: RFC 3986, section 6.2.2.
    """

    def normal(escape: re.Match[str]) -> str:
        character = chr(int(escape[1], 16))
        return character if UNRESERVED.fullmatch(character) else escape[0].upper()

    return ESCAPE.sub(normal, text)


def _remove_dot_segments(path: str) -> str:
    """Remove dot segments, encoded ones too, as browsers do, so that robots.txt is checked for the fetched path.

    Source: RFC 3986, section 5.2.4. `urljoin` leaves dot segments in absolute URLs.
    """
    if "." not in path and "%2e" not in path.lower():
        return path
    segments: list[str] = []
    plain = ""
    for segment in path.split("/")[1:]:
        plain = segment.lower().replace("%2e", ".")
        if plain == "..":
            del segments[-1:]
        elif plain != ".":
            segments.append(segment)
    return "/" + "/".join([*segments, ""] if plain in (".", "..") else segments)


def origin_of(url: str) -> str:
    """Return the scheme, host and port of `url`."""
    return "{0.scheme}://{0.netloc}".format(urlsplit(url))


def parse_start_url(url: object) -> str:
    """Return the start URL `url`, normalized.

    :raises UnsafeUrlError: its scheme is neither http nor https.
    :raises ConfigurationError: it is not the URL of a web page.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"a start URL is a str, not {url!r}")
    if normalized := normalize_url(url):
        return normalized
    scheme = re.match(r"\s*([a-zA-Z][a-zA-Z0-9+.-]*):(?!\d+(/|$))", url)
    if scheme and scheme[1].lower() not in ("http", "https"):
        raise UnsafeUrlError(f"{url!r} is not fetched: only http:// and https:// addresses are")
    raise ConfigurationError(
        f"{url!r} is not the address of a web page: write https://host/path, without user name and password"
    )
