"""Addresses of web pages: one spelling each, and connections only to those that are allowed."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from streamrag.errors import ConfigurationError, UnsafeUrlError
from streamrag.sources.http.counted import CountedStream
from streamrag.sources.threads import Threads

MAX_URL_CHARS = 2000
MAX_ADDRESSES = 4
"""Addresses of one host that are tried, one after the other."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")

NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""What not every `ipaddress` of Python takes for special, though IANA's registries do; and the address by which virtual
machines in Azure are managed."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to IP addresses, best first."""


def normalize_url(url: str, base: str = "") -> str | None:
    """`url`, resolved against `base`, in one spelling per page; None if no page can be there."""
    if len(url := url.strip()) > MAX_URL_CHARS:
        return None
    try:
        parts = urlsplit(urljoin(base, url))
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
        path = _without_dots(quote(parts.path or "/", safe="/%:@!$&'()*+,;=~"))
        query = "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else ""
    except ValueError:  # of a lone surrogate too
        return None
    if port == 0 or parts.scheme not in ("http", "https") or parts.username is not None or parts.password is not None:
        return None
    if "[" in parts.netloc:
        if not re.fullmatch(r"[0-9a-f:.]+", host):  # a zone, or an address of the future
            return None
        host = f"[{host}]"
    elif not re.fullmatch(r"[a-z0-9._-]+", host):
        return None
    if port is not None and port != {"http": 80, "https": 443}[parts.scheme]:
        host += f":{port}"
    normalized = f"{parts.scheme}://{host}{path}{query}"
    return normalized if len(normalized) <= MAX_URL_CHARS else None


def _without_dots(path: str) -> str:
    """As browsers do and servers may, so that robots.txt is asked about the page that is fetched.

    Source: RFC 3986, section 5.2.4. In an address with a host, `urljoin` leaves them.
    """
    if "." not in path and "%2e" not in path.lower():
        return path
    kept: list[str] = []
    plain = ""
    for segment in path.split("/")[1:]:
        plain = segment.lower().replace("%2e", ".")
        if plain == "..":
            del kept[-1:]
        elif plain != ".":
            kept.append(segment)
    return "/" + "/".join([*kept, ""] if plain in (".", "..") else kept)


def parse_start_url(url: object) -> str:
    """`url`, normalised.

    :raises UnsafeUrlError: its scheme is neither http nor https.
    :raises ConfigurationError: it is no address of a web page.
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


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return _is_public(address.ipv4_mapped)
        if address in NAT64:  # a gateway connects to the IPv4 address in the last 32 bits
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local or (address.sixtofour and not _is_public(address.sixtofour)):
            return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def resolve(host: str, port: int, *, threads: Threads) -> Sequence[str]:
    """The system's answer. It understands 127.1 and 0x7f000001 too, so the answer is what to check.

    Not in the event loop's executor: a name server that does not answer holds a thread for half a minute.
    """
    found = await threads.run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to addresses that it has checked, so that a name cannot lead elsewhere a moment after its check.

    Source: https://www.encode.io/httpcore/network-backends/
    """

    def __init__(self, *, connect_timeout_s: float, allow_private: bool, resolve: Resolve) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._allow_private = allow_private
        self._resolve = resolve
        self._sockets = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        timeout_s = self._connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                addresses = await self.check(host, port)
                for address in addresses[:-1]:
                    try:
                        return await self._connect(address, port, timeout_s / len(addresses))
                    except (httpcore.ConnectError, httpcore.ConnectTimeout):
                        continue
                return await self._connect(addresses[-1], port)
        except httpcore.ConnectError as error:
            raise httpcore.ConnectError(_root_cause(error)) from None
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"no connection within {timeout_s:g} s") from None

    async def _connect(self, address: str, port: int, timeout_s: float | None = None) -> CountedStream:
        return CountedStream(await self._sockets.connect_tcp(address, port, timeout=timeout_s))

    async def check(self, host: str, port: int) -> Sequence[str]:
        """The addresses of `host`.

        :raises UnsafeUrlError: one of them is not to be connected to.
        :raises httpcore.ConnectError: there are none.
        """
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name {host} cannot be resolved: {error}") from None
        for address in addresses:
            if not self._allow_private and not _is_public(ipaddress.ip_address(address)):
                raise UnsafeUrlError(
                    f"{host} is at {address}, which is not a public address and is not fetched from. "
                    "If you trust what this crawl can reach, pass allow_private=True (--allow-private)"
                )
        if not addresses:
            raise httpcore.ConnectError(f"the name {host} has no address")
        return addresses[:MAX_ADDRESSES]


def _root_cause(error: BaseException) -> str:
    """What went wrong in the operating system's words, which anyio and httpcore wrap in their own."""
    while error.__cause__:
        error = error.__cause__
    return str(error)
