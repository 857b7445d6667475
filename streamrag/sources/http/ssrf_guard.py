"""Connections to public addresses only, so that no page can make us send a request to an internal machine (SSRF)."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import httpcore

from streamrag.errors import UnsafeUrlError
from streamrag.sources.threads import Threads
from streamrag.support.counted_stream import CountedStream

MAX_ADDRESSES = 4  # addresses of one host that are tried, one after the other
NAT64 = ipaddress.ip_network("64:ff9b::/96")

NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Networks that IANA's registries list as special, but `ipaddress` of some Python versions does not; and the management
address of virtual machines in Azure."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from a host and a port to IP addresses, best first."""


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address, and any IPv4 address embedded in it, is global, and neither multicast nor reserved."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return is_public(address.ipv4_mapped)
        if address in NAT64:  # a gateway connects to the IPv4 address in the last 32 bits
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local or (address.sixtofour and not is_public(address.sixtofour)):
            return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def resolve(host: str, port: int, *, threads: Threads) -> Sequence[str]:
    """Return the IP addresses of `host`, resolved by the system in one of `threads`.

    The system also accepts hosts such as 127.1 and 0x7f000001, so the result must be checked, not the host. The event
    loop's executor is not used: a name server that does not answer blocks a thread for half a minute.
    """
    results = await threads.run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(address[0]) for *_, address in results))


@dataclass(kw_only=True, eq=False)
class GuardedBackend(httpcore.AsyncNetworkBackend):
    """A network backend that connects only to the addresses that it has checked.

    A name cannot resolve to another address between check and connection (DNS rebinding).
    Source: https://www.encode.io/httpcore/network-backends/
    """

    connect_timeout_s: float
    allow_private: bool
    resolve: Resolve
    sockets: httpcore.AsyncNetworkBackend = field(default_factory=httpcore.AnyIOBackend)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Return a connection to the first checked address of `host` that accepts one within `connect_timeout_s`.

        Raise as `check` and httpcore do; the other arguments are ignored.
        """
        timeout_s = self.connect_timeout_s
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
        return CountedStream(await self.sockets.connect_tcp(address, port, timeout=timeout_s))

    async def check(self, host: str, port: int) -> Sequence[str]:
        """Resolve `host`, and return its first `MAX_ADDRESSES` addresses if all of them are allowed.

        :raises UnsafeUrlError: an address is not public, and private ones are not allowed.
        :raises httpcore.ConnectError: there is no address.
        """
        try:
            addresses = await self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name {host} cannot be resolved: {error}") from None
        for address in addresses:
            if not self.allow_private and not is_public(ipaddress.ip_address(address)):
                raise UnsafeUrlError(
                    f"{host} is at {address}, which is not a public address and is not fetched from. "
                    "If you trust what this crawl can reach, pass allow_private=True (--allow-private)"
                )
        if not addresses:
            raise httpcore.ConnectError(f"the name {host} has no address")
        return addresses[:MAX_ADDRESSES]


def _root_cause(error: BaseException) -> str:
    """Return the operating system's message, which anyio and httpcore wrap."""
    while error.__cause__:
        error = error.__cause__
    return str(error)
