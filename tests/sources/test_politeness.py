"""How seldom a host is asked, and for how long it is left alone when it wants to be."""

import asyncio
import itertools
from typing import Any

import pytest

from streamrag.sources.http import politeness
from streamrag.sources.http.page import HttpStatusError, PutOffError, UnusablePageError
from streamrag.sources.http.politeness import CrawlTurns, Hosts

pytest.importorskip("tenacity")
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to what is waited for next."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def event_loop_policy() -> Any:
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return Clock()

    return Policy()


def now() -> float:
    return asyncio.get_running_loop().time() - 1000


def turns(hosts: Hosts, deadline_s: float = 100, num_fetches: int = 6) -> CrawlTurns:
    return CrawlTurns(hosts, num_fetches=num_fetches, deadline=1000 + deadline_s)


class Server:
    """Notes when it is asked; each answer takes a second."""

    def __init__(self, *errors: UnusablePageError) -> None:
        self.asked_s: list[float] = []
        self.num_at_once = 0
        self.most_at_once = 0
        self.errors = list(errors)

    async def send(self) -> str:
        self.asked_s.append(round(now(), 3))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(1)
        finally:
            self.num_at_once -= 1
        if self.errors:
            raise self.errors.pop(0)
        return "page"


async def test_a_host_gets_a_few_requests_at_a_time_from_all_crawls_together() -> None:
    hosts, server = Hosts(2), Server()
    crawls = [turns(hosts), turns(hosts)]
    await asyncio.gather(*(crawl.ask("http://a.example/", server.send) for crawl in crawls for _ in range(4)))
    assert server.most_at_once == 2
    assert server.asked_s == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_other_hosts_do_not_wait_for_a_busy_one() -> None:
    hosts, slow, fast = Hosts(2), Server(), Server()
    crawl = turns(hosts, num_fetches=3)
    await asyncio.gather(
        *(crawl.ask("http://a.example/", slow.send) for _ in range(6)), crawl.ask("http://b.example/", fast.send)
    )
    assert fast.asked_s == [0]


async def test_a_crawl_that_comes_later_does_not_wait_for_all_pages_of_the_first() -> None:
    hosts, first, second = Hosts(2), Server(), Server()
    one, other = turns(hosts), turns(hosts)
    many = [asyncio.create_task(one.ask("http://a.example/", first.send)) for _ in range(20)]
    await asyncio.sleep(0.5)
    await other.ask("http://a.example/", second.send)
    assert second.asked_s[0] <= 3
    await asyncio.gather(*many)


async def test_a_crawl_delay_is_kept_between_requests_of_all_crawls() -> None:
    hosts, server = Hosts(4), Server()
    crawls = [turns(hosts), turns(hosts)]
    for crawl in crawls:
        crawl.set_delay("http://a.example/", 5)
    await asyncio.gather(*(crawl.ask("http://a.example/", server.send) for crawl in crawls for _ in range(2)))
    assert server.asked_s == [0, 5, 10, 15]


@pytest.mark.parametrize("delays_s", [(5, 0), (0, 5), (5, 2)])
async def test_a_host_is_one_for_http_and_https_and_its_longest_delay_holds(delays_s: tuple[int, int]) -> None:
    hosts, server = Hosts(4), Server()
    one, other = turns(hosts), turns(hosts)
    for crawl in (one, other):
        crawl.set_delay("http://a.example/", delays_s[0])
        crawl.set_delay("https://a.example/", delays_s[1])
    late = turns(hosts)
    late.set_delay("http://a.example/", delays_s[0])  # it knows nothing of the other
    urls = ["http://a.example/", "https://a.example/"]
    for crawl in (one, other, late):
        for url in urls:
            await crawl.ask(url, server.send)
    assert server.asked_s == [0, 5, 10, 15, 20, 25]


async def test_waiting_for_a_delay_keeps_no_other_host_waiting() -> None:
    hosts, slow, fast = Hosts(4), Server(), Server()
    crawl = turns(hosts, num_fetches=2)
    crawl.set_delay("http://a.example/", 50)
    waiting = [asyncio.create_task(crawl.ask("http://a.example/", slow.send)) for _ in range(2)]
    await asyncio.sleep(0)
    await crawl.ask("http://b.example/", fast.send)
    assert fast.asked_s == [0]
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_several_hosts_that_want_time_keep_no_other_host_waiting(is_busy: bool) -> None:
    hosts, fast = Hosts(4), Server()
    slow = [Server(*[HttpStatusError(429, 50.0)] * is_busy) for _ in range(3)]
    crawl = turns(hosts, num_fetches=2, deadline_s=200)
    for number in range(3):
        crawl.set_delay(f"http://{number}.example/", 50)
    waiting = [
        asyncio.create_task(crawl.ask(f"http://{number}.example/", slow[number].send))
        for number in range(3)
        for _ in range(2)
    ]
    await asyncio.sleep(5)
    for _ in range(3):
        await crawl.ask("http://b.example/", fast.send)
    assert fast.asked_s == [5, 6, 7]
    await asyncio.gather(*waiting)
    assert all(b - a >= 50 for server in slow for a, b in itertools.pairwise(server.asked_s))


async def test_a_delay_is_kept_though_a_crawl_waits_for_its_own_fetches() -> None:
    hosts, server, other = Hosts(4), Server(), Server()
    crawls = [turns(hosts, num_fetches=1) for _ in range(3)]
    for crawl in crawls:
        crawl.set_delay("http://a.example/", 5)
    asking = [
        asyncio.create_task(crawl.ask(url, send))
        for crawl in crawls
        for url, send in [("http://b.example/", other.send)] * 3 + [("http://a.example/", server.send)] * 2
    ]
    await asyncio.gather(*asking)
    assert len(server.asked_s) == 6
    assert all(b - a >= 5 for a, b in itertools.pairwise(server.asked_s))


async def test_a_request_that_would_come_after_the_crawl_is_put_off_at_once() -> None:
    crawl, server = turns(Hosts(4), deadline_s=30), Server()
    crawl.set_delay("http://a.example/", 3600)
    await crawl.ask("http://a.example/", server.send)
    with pytest.raises(PutOffError, match=r"permits the next request in 3599\.0 s, when the crawl is over"):
        await crawl.ask("http://a.example/", server.send)
    assert now() == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_host_is_asked_again_when_it_says(status: int) -> None:
    hosts, server = Hosts(4), Server(HttpStatusError(status, 7.0))
    crawl = turns(hosts)
    assert await crawl.ask("http://a.example/", server.send) == "page"
    assert server.asked_s == [0, 8]


async def test_all_pages_wait_for_a_busy_host() -> None:
    hosts, server = Hosts(1), Server(HttpStatusError(429, 7.0))
    crawls = [turns(hosts), turns(hosts)]
    await asyncio.gather(*(crawl.ask("http://a.example/", server.send) for crawl in crawls))
    assert server.asked_s == [0, 8, 9]


async def test_a_host_that_stays_busy_is_given_up_after_three_requests() -> None:
    server = Server(*(HttpStatusError(503) for _ in range(9)))
    with pytest.raises(HttpStatusError, match="HTTP 503"):
        await turns(Hosts(4)).ask("http://a.example/", server.send)
    assert len(server.asked_s) == 3
    assert now() < 3 + 2 * politeness.MAX_WAIT_S


async def test_no_request_waits_beyond_the_end_of_the_crawl() -> None:
    server = Server(HttpStatusError(429, 1e9))
    with pytest.raises(HttpStatusError, match=r"HTTP 429, and asks to wait for 1e\+09 s"):
        await turns(Hosts(4), deadline_s=30).ask("http://a.example/", server.send)
    assert now() == 1
    hold = Hosts(1)
    async with hold.using("a.example") as host:
        host.hold(1e9)
        assert host.free_at - 1001 == politeness.MAX_HOLD_S


@pytest.mark.parametrize("status", [404, 500, 502])
async def test_other_errors_are_not_asked_for_again(status: int) -> None:
    server = Server(HttpStatusError(status))
    with pytest.raises(HttpStatusError):
        await turns(Hosts(4)).ask("http://a.example/", server.send)
    assert server.asked_s == [0]


async def test_cancelling_at_any_moment_frees_the_turn() -> None:
    for moment_s in (0.0, 0.5, 3.0, 6.5, 9.0, 12.0):
        hosts, server = Hosts(1), Server(HttpStatusError(503, 2.0))
        crawl = turns(hosts, deadline_s=1000)
        crawl.set_delay("http://a.example/", 3)
        asking = [asyncio.create_task(crawl.ask("http://a.example/", server.send)) for _ in range(4)]
        await asyncio.sleep(moment_s)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert await crawl.ask("http://a.example/", server.send) == "page"
        async with hosts.using("a.example") as host:
            assert host.num_users == 1
            assert not host._places.locked()


async def test_unused_hosts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(politeness, "MAX_HOSTS", 10)
    hosts, server = Hosts(4), Server()
    crawl = turns(hosts, deadline_s=1000)
    for number in range(30):
        await crawl.ask(f"http://{number}.example/", server.send)
    assert len(hosts._hosts) == 10
