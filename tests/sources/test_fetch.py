import asyncio
import datetime
import gzip
import itertools
import socket
import ssl
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from website import Website

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.http import ssrf_guard
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import CostlyPageError, NoConnectionError, Page, UnusablePageError
from streamrag.sources.threads import Threads

CONTEXT = ssl.create_default_context()

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.fixture
async def site() -> AsyncIterator[Website]:
    async with Website().running() as site:
        yield site


@asynccontextmanager
async def fetching(
    *, resolved: dict[str, Sequence[str]] | None = None, context: ssl.SSLContext | None = None, **limits: Any
) -> AsyncIterator[Fetcher]:
    threads = Threads(2, "resolve")

    async def resolve(host: str, port: int) -> Sequence[str]:
        if resolved is None:
            return await ssrf_guard.resolve(host, port, threads=threads)
        if host not in resolved:
            raise socket.gaierror("Name or service not known")
        return resolved[host]

    defaults = {"page_timeout_s": 100, "connect_timeout_s": 50, "max_body_bytes": 4 << 20, "allow_private": True}
    fetcher = Fetcher(
        **{**defaults, **limits},  # type: ignore[arg-type]
        user_agent="streamrag/test",
        ssl_context=context or CONTEXT,
        resolve=resolve,
    )
    try:
        yield fetcher
    finally:
        await fetcher.aclose()
        for _ in range(5):  # httpcore leaves its generators to the event loop, which ends them in its next steps
            await asyncio.sleep(0)


async def fetch(url: str, **options: Any) -> Page:
    async with fetching(**options) as fetcher:
        return await fetcher.fetch(url, lambda url: None)


async def test_a_page_comes_with_what_is_needed_to_read_it(site: Website) -> None:
    url = site.add("/a", "<p>ä</p>".encode("latin-1"), content_type='Text/HTML; charset="ISO-8859-1"')
    assert await fetch(url) == Page(url, "html", "ISO-8859-1", b"<p>\xe4</p>")
    url = site.add("/b", "text", content_type="text/plain")
    assert await fetch(url) == Page(url, "text", "", b"text")
    url = site.add("/c", "<p>", content_type=None)
    assert (await fetch(url)).kind == "html"


async def test_the_server_is_asked_for_the_whole_address(site: Website) -> None:
    for path in ("/view;id=42?x=1", "/a;b/c;d", "/a?b;c=/", "//a", "/%7Ea%2Fb"):
        assert (await fetch(site.add(path, "a"))).url == site.url(path)
        assert site.paths[-1] == path


async def test_requests_say_who_asks_and_carry_no_cookie(site: Website) -> None:
    site.add("/a", "a", headers={"Set-Cookie": "who=you"})
    async with fetching() as fetcher:
        for _ in range(2):
            await fetcher.fetch(site.url("/a"), lambda url: None)
    assert site.requests[1].headers == {
        "host": f"127.0.0.1:{site.port}",
        "user-agent": "streamrag/test",
        "accept": "text/html, application/xhtml+xml, text/plain;q=0.5, application/pdf;q=0.5",
        "accept-encoding": "gzip",
    }


async def test_the_environments_proxy_is_not_used(site: Website, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert (await fetch(site.add("/a", "a"))).body == b"a"


async def test_redirects_are_followed_one_by_one_after_asking(site: Website) -> None:
    site.add_redirect("/a", "b/c?x=1#there", status=301)
    site.add_redirect("/b/c?x=1", f"http://localhost:{site.port}/d", status=307)
    site.add("/d", "the end")
    asked: list[str] = []
    async with fetching() as fetcher:
        page = await fetcher.fetch(site.url("/a"), asked.append)
    assert page.body == b"the end"
    assert page.url == site.url("/d", host="localhost")
    assert asked == [site.url("/b/c?x=1"), site.url("/d", host="localhost")]


async def test_the_address_of_a_redirect_may_be_in_utf_8(site: Website) -> None:
    site.add_redirect("/a", "/ü")
    site.add("/%C3%BC", "the end")
    assert (await fetch(site.url("/a"))).body == b"the end"


async def test_a_redirect_that_is_not_wanted_is_not_followed(site: Website) -> None:
    def refuse(url: str) -> None:
        raise UnusablePageError(f"I do not want {url}")

    async with fetching() as fetcher:
        with pytest.raises(UnusablePageError, match=r"I do not want .*/b"):
            await fetcher.fetch(site.add_redirect("/a", "/b"), refuse)
    assert site.paths == ["/a"]


@pytest.mark.parametrize("num_redirects", [5, 6])
async def test_at_most_five_redirects_are_followed(site: Website, num_redirects: int) -> None:
    for i in range(num_redirects):
        site.add_redirect(f"/{i}", f"/{i + 1}")
    site.add(f"/{num_redirects}", "the end")
    if num_redirects == 5:
        assert (await fetch(site.url("/0"))).body == b"the end"
    else:
        with pytest.raises(UnusablePageError, match="more than 5 times"):
            await fetch(site.url("/0"))


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://example.com/", "http://user:pw@example.com/"])
async def test_redirects_lead_to_web_addresses_only(site: Website, location: str) -> None:
    with pytest.raises(UnusablePageError, match="which is not an http or https URL"):
        await fetch(site.add_redirect("/a", location))


# ------------------------------------------------------------------------------------------- addresses that are refused

PRIVATE = [
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "[::]",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::127.0.0.1]",
    "[fd00::1]",
    "[fe80::1]",
    "[fec0::1]",
    "[ff02::1]",
    "[2002:7f00:1::]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::1]",
    "168.63.129.16",
    "[2002:a83f:8110::]",
    "[64:ff9b::a83f:8110]",
    "192.0.0.8",
    "192.88.99.1",
    "[3fff::1]",
    "localhost",
]


@pytest.mark.parametrize("host", PRIVATE)
async def test_an_address_that_is_not_public_is_refused(site: Website, host: str) -> None:
    with pytest.raises(UnsafeUrlError, match=r"is not a public address .* pass allow_private=True"):
        await fetch(site.url("/a", host=host), allow_private=False)
    assert site.num_open == 0
    assert site.paths == []


async def test_a_private_address_among_public_ones_is_refused() -> None:
    with pytest.raises(UnsafeUrlError, match=r"two\.example is at 10\.0\.0\.1"):
        await fetch("http://two.example/", resolved={"two.example": ["8.8.8.8", "10.0.0.1"]}, allow_private=False)


@pytest.fixture
def public_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 passes for a public address; the rest of 127.0.0.0/8 stays private."""
    judge = ssrf_guard.is_public
    monkeypatch.setattr(ssrf_guard, "is_public", lambda address: str(address) == "127.0.0.1" or judge(address))


@pytest.mark.usefixtures("public_loopback")
async def test_a_redirect_to_a_private_address_is_refused(site: Website) -> None:
    site.add("/secret", "secret")
    url = site.add_redirect("/a", site.url("/secret", host="127.0.0.2"))
    with pytest.raises(UnusablePageError, match=r"it redirects to http://127\.0\.0\.2.* is not a public address"):
        await fetch(url, allow_private=False)
    assert site.paths == ["/a"]


@pytest.mark.usefixtures("public_loopback")
async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(site: Website) -> None:
    """A name whose address changes between two look-ups (DNS rebinding) leads nowhere else."""
    lookups: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["127.0.0.2"]

    site.add("/a", "a", headers={"Connection": "close"})
    url = site.url("/a", host="rebinding.example")
    limits: dict[str, Any] = {
        "page_timeout_s": 50,
        "connect_timeout_s": 50,
        "max_body_bytes": 1000,
        "allow_private": False,
    }
    fetcher = Fetcher(**limits, user_agent="test", ssl_context=CONTEXT, resolve=rebinding)
    assert (await fetcher.fetch(url, lambda url: None)).body == b"a"
    assert lookups == ["rebinding.example"]
    assert site.requests[0].headers["host"] == f"rebinding.example:{site.port}"
    with pytest.raises(UnsafeUrlError, match=r"rebinding\.example is at 127\.0\.0\.2"):
        await fetcher.fetch(url, lambda url: None)
    await fetcher.aclose()


async def test_an_address_is_checked_for_a_browser_too(site: Website) -> None:
    async with fetching(allow_private=False) as fetcher:
        with pytest.raises(UnsafeUrlError, match="localhost is at"):
            await fetcher.check_address("http://localhost/")
    async with fetching(resolved={}) as fetcher:
        with pytest.raises(UnreachableError, match=r"nowhere\.example cannot be resolved"):
            await fetcher.check_address("https://nowhere.example/")
    async with fetching() as fetcher:
        await fetcher.check_address(site.url())


# ---------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A self-signed certificate for docs.example, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "docs.example")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("docs.example")]), critical=False)
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


async def test_a_pinned_connection_still_verifies_the_name(certificate: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    names: dict[str, Sequence[str]] = {"docs.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]}
    async with Website().running(server) as site:
        site.add("/a", "a")
        url = f"https://docs.example:{site.port}/a"
        assert (await fetch(url, resolved=names, context=trusting)).body == b"a"
        assert site.server_names == ["docs.example"]
        assert site.requests[0].headers["host"] == f"docs.example:{site.port}"
        with pytest.raises(UnreachableError, match=r"certificate is not valid for 'other\.example'"):
            await fetch(url.replace("docs", "other"), resolved=names, context=trusting)
        with pytest.raises(UnreachableError, match="self-signed certificate"):
            await fetch(url, resolved=names)
        assert site.paths == ["/a"]


async def test_a_broken_record_of_tls_is_a_broken_connection(certificate: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with Website().running(server) as site:
        site.add("/a", "a whole page", fault="breaks TLS")
        url = f"https://docs.example:{site.port}/a"
        with pytest.raises(UnusablePageError, match=r"its connection broke off: .*SSL"):
            await fetch(url, resolved={"docs.example": ["127.0.0.1"]}, context=trusting)


# ------------------------------------------------------------------------------------------------- when things go wrong


async def test_a_server_that_refuses_is_unreachable(site: Website) -> None:
    url = site.url("/", host="127.0.0.9")
    with pytest.raises(UnreachableError, match=rf"{url} cannot be reached: .*Connect call failed"):
        await fetch(url)


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    with pytest.raises(UnreachableError, match=r"nowhere\.example cannot be resolved: .*not known"):
        await fetch("http://nowhere.example/", resolved={})
    with pytest.raises(UnreachableError, match=r"empty\.example has no address"):
        await fetch("http://empty.example/", resolved={"empty.example": []})


async def test_a_name_server_that_does_not_answer_is_given_up() -> None:
    async def silent(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError

    limits: dict[str, Any] = {
        "page_timeout_s": 5,
        "connect_timeout_s": 0.05,
        "max_body_bytes": 1000,
        "allow_private": True,
    }
    fetcher = Fetcher(**limits, user_agent="test", ssl_context=CONTEXT, resolve=silent)
    with pytest.raises(NoConnectionError, match=r"no connection within 0\.05 s"):
        await fetcher.fetch("http://slow.example/", lambda url: None)
    await fetcher.aclose()


async def test_the_second_address_is_tried_when_the_first_refuses(site: Website) -> None:
    site.add("/a", "a")
    url = site.url("/a", host="two.example")
    assert (await fetch(url, resolved={"two.example": ["127.0.0.9", "127.0.0.1"]})).body == b"a"


@pytest.mark.parametrize("fault", ["silent", "never ends"])
async def test_a_page_that_never_ends_is_given_up_at_its_deadline(site: Website, fault: str) -> None:
    url = site.add("/a", "<p>beginning", fault=fault)
    with pytest.raises(UnusablePageError, match=r"did not end within 0\.1 s"):
        await fetch(url, page_timeout_s=0.1)
    await site.until_all_closed()


async def test_a_connection_that_breaks_off_is_told_from_one_that_never_answered(site: Website) -> None:
    with pytest.raises(UnusablePageError, match="its connection broke off"):
        await fetch(site.add("/half", "a whole page", fault="breaks off"))
    with pytest.raises(UnreachableError, match="cannot be reached"):
        await fetch(site.add("/none", fault="breaks off at once"))


async def test_cancelling_closes_the_connection(site: Website) -> None:
    url = site.add("/a", "<p>beginning", fault="never ends")
    async with fetching() as fetcher:
        task = asyncio.create_task(fetcher.fetch(url, lambda url: None))
        await site.until_asked("/a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await site.until_all_closed()


async def test_closing_leaves_no_connection_open(site: Website) -> None:
    async with fetching() as fetcher:
        await fetcher.fetch(site.add("/a", "a"), lambda url: None)
        assert site.num_open == 1
    await site.until_all_closed()


@pytest.mark.parametrize("status", [304, 400, 404, 500, 503])
async def test_an_http_error_is_no_page(site: Website, status: int) -> None:
    with pytest.raises(UnusablePageError, match=f"answers HTTP {status}"):
        await fetch(site.add("/a", "" if status == 304 else "<p>oops", status=status))


async def test_a_wrong_type_is_not_read(site: Website) -> None:
    with pytest.raises(UnusablePageError, match="it is application/zip, not a web page"):
        await fetch(site.add("/a", "PK", content_type="application/zip", fault="never ends"))


async def test_an_empty_page_is_no_page(site: Website) -> None:
    with pytest.raises(UnusablePageError, match="it is empty"):
        await fetch(site.add("/a", " \n "))


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
async def test_compressed_pages_are_decompressed(site: Website, compress: Any) -> None:
    text = b"".join(b"%d " % i for i in range(100_000))
    url = site.add("/a", compress(text), headers={"Content-Encoding": "gzip"})
    assert (await fetch(url)).body == text


async def test_damaged_and_foreign_compression_is_no_page(site: Website) -> None:
    with pytest.raises(UnusablePageError, match="compression is damaged"):
        await fetch(site.add("/a", b"not gzip at all", headers={"Content-Encoding": "gzip"}))
    cut = gzip.compress(b"<p>text")[:-4]
    with pytest.raises(UnusablePageError, match="compression is damaged: it ends too early"):
        await fetch(site.add("/cut", cut, headers={"Content-Encoding": "gzip"}))
    with pytest.raises(UnusablePageError, match="compressed as 'br', which was not requested"):
        await fetch(site.add("/b", b"brotli?", headers={"Content-Encoding": "br"}))


async def test_a_body_over_the_limit_is_dropped(site: Website) -> None:
    url = site.add("/a", b"x" * 1001)
    assert len((await fetch(url, max_body_bytes=1001)).body) == 1001
    with pytest.raises(UnusablePageError, match="larger than max_body_bytes=1000"):
        await fetch(url, max_body_bytes=1000)


async def test_a_decompression_bomb_costs_no_more_than_the_limit(site: Website) -> None:
    compressor = zlib.compressobj(wbits=31)
    bomb = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(16)) + compressor.flush()
    assert len(bomb) < 2 << 20  # 256 MiB of zeros
    url = site.add("/a", bomb, headers={"Content-Encoding": "gzip"})
    tracemalloc.start()
    with pytest.raises(UnusablePageError, match="larger than"):
        await fetch(url)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


# ------------------------------------------------------------------------------------------- servers that send too much


class RawServer:
    """Sends what a test says, byte for byte, and counts what the client takes."""

    def __init__(self, *parts: bytes, endlessly: bytes = b"") -> None:
        self.parts = parts
        self.endlessly = endlessly
        self.num_taken = 0
        """Bytes, those in the system's buffers included."""
        self.answering: asyncio.Task[None] | None = None
        self.url = ""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering = asyncio.current_task()
        writer.transport.set_write_buffer_limits(0)
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for part in self.parts:
                await self._send(writer, part)
            while self.endlessly:
                await self._send(writer, self.endlessly)
            await reader.read()  # until the client has gone
        writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(part)
        await writer.drain()
        self.num_taken += len(part)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RawServer"]:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        server = await asyncio.start_server(self._answer, sock=listening)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            yield self
        finally:
            if self.answering:
                await asyncio.wait([self.answering])
            server.close()
            await server.wait_closed()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
KERNEL_BYTES = 8 << 20
"""More than the buffers of both sockets hold."""


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
async def test_bytes_after_the_end_of_compression_are_not_kept(compress: Any) -> None:
    head = HEAD + b"Content-Encoding: gzip\r\n\r\n"
    async with RawServer(head + compress(b"<p>text"), endlessly=bytes(1 << 20)).running() as server:
        tracemalloc.start()
        page = await fetch(server.url, max_body_bytes=64 << 20)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert page.body == b"<p>text"
    assert server.num_taken < KERNEL_BYTES
    assert peak_bytes < KERNEL_BYTES


async def test_the_first_of_several_compressed_streams_is_the_page(site: Website) -> None:
    body = gzip.compress(b"<p>first") + gzip.compress(b"second")
    assert (await fetch(site.add("/a", body, headers={"Content-Encoding": "gzip"}))).body == b"<p>first"


async def test_a_compressed_page_leaves_its_connection_open_for_the_next(site: Website) -> None:
    url = site.add("/a", gzip.compress(b"<p>text"), headers={"Content-Encoding": "gzip"})
    async with fetching() as fetcher:
        for _ in range(3):
            await fetcher.fetch(url, lambda url: None)
            assert site.num_open == 1
    assert site.num_connections == 1


@pytest.mark.parametrize(
    ("beginning", "endlessly"),
    [
        (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\x03", b"x" * 4096),  # the name of the file
        (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\0\0\0\0\0\0\x03", b"\0\0\0\xff\xff" * 800),  # empty blocks
        (HEAD + b"\r\n", b"x" * 4096),
        (CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    ],
)
async def test_raw_bytes_count_as_well_as_decompressed_ones(beginning: bytes, endlessly: bytes) -> None:
    async with RawServer(beginning, endlessly=endlessly).running() as server:
        with pytest.raises(UnusablePageError, match="larger than max_body_bytes=1000000"):
            await fetch(server.url, max_body_bytes=1_000_000)
    assert server.num_taken < KERNEL_BYTES


@pytest.mark.parametrize(
    "endlessly",
    [
        b"X-Field: value\r\n",
        b"a:\r\n",
        b"X-Long: " + b"x" * 4096,
        b"x" * 4096,
    ],
)
async def test_a_head_without_end_is_given_up(endlessly: bytes) -> None:
    async with RawServer(HEAD, endlessly=endlessly).running() as server:
        with pytest.raises(UnusablePageError, match="head of the server's answer is larger than 32768 bytes"):
            await fetch(server.url)
    assert server.num_taken < KERNEL_BYTES


@pytest.mark.parametrize("interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\nLink: </a>\r\n\r\n"])
async def test_interim_responses_count_as_part_of_the_head(interim: bytes) -> None:
    async with RawServer(interim * 3 + HEAD + b"Content-Length: 4\r\n\r\ntext").running() as server:
        assert (await fetch(server.url)).body == b"text"
    async with RawServer(endlessly=interim).running() as server:
        with pytest.raises(UnusablePageError, match="head of the server's answer"):
            await fetch(server.url)
    assert server.num_taken < KERNEL_BYTES


async def test_many_header_fields_are_refused_and_a_usual_number_is_not() -> None:
    for num_fields, fits in ((150, True), (250, False)):
        fields = b"".join(b"X-%d: x\r\n" % i for i in range(num_fields))
        async with RawServer(HEAD + fields + b"Content-Length: 4\r\n\r\ntext").running() as server:
            if fits:
                assert (await fetch(server.url)).body == b"text"
            else:
                with pytest.raises(UnusablePageError, match="header fields"):
                    await fetch(server.url)


@pytest.mark.parametrize(
    ("beginning", "endlessly"),
    [
        (CHUNKED, b"1\r\nx\r\n"),  # six bytes for one
        (CHUNKED, b"1;" + b"x" * 5000 + b"\r\nx\r\n"),  # extensions of chunks
        (CHUNKED, b"1;" + b"x" * 4096),
        (CHUNKED + b"4\r\ntext\r\n0\r\n", b"X-Trailer: value\r\n"),
        (CHUNKED, b"0" * 4096),
    ],
)
async def test_bytes_sent_beside_the_body_are_bounded(beginning: bytes, endlessly: bytes) -> None:
    async with RawServer(beginning, endlessly=endlessly).running() as server:
        with pytest.raises(UnusablePageError, match=r"bytes for|connection broke off: "):
            await fetch(server.url)
    assert server.num_taken < KERNEL_BYTES


async def test_a_page_in_usual_chunks_with_trailers_is_a_page() -> None:
    chunk = b"%x;name=value\r\n" % 1000 + b"x" * 1000 + b"\r\n"
    async with RawServer(CHUNKED + chunk * 1000 + b"0\r\nX-Trailer: value\r\n\r\n").running() as server:
        assert len((await fetch(server.url)).body) == 1_000_000


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200", HEAD, HEAD + b"\r\n", CHUNKED])
async def test_an_answer_that_drips_is_given_up_at_the_pages_deadline(beginning: bytes) -> None:
    answering = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        gone = asyncio.create_task(reader.read())
        with suppress(OSError):
            for byte in itertools.chain(beginning, itertools.repeat(ord("1"))):
                writer.write(bytes([byte]))
                await writer.drain()
                if (await asyncio.wait([gone], timeout=0.01))[0]:
                    break
        await asyncio.wait([gone])
        writer.transport.abort()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    with pytest.raises(CostlyPageError, match=r"did not end within 0\.3 s"):
        await fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", page_timeout_s=0.3)
    await asyncio.wait(answering)
    server.close()
    await server.wait_closed()
