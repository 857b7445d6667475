"""What is done about an engine that does not live, or cannot tell."""

import asyncio

import pytest

from streamrag.core import Progress
from streamrag.errors import BackendError, EngineDeadError
from streamrag.serve.engine_watch import EngineWatch, RestartBudget
from streamrag.testing import ScriptedBackend
from tests.serve.serving import serving


class Confused(ScriptedBackend):
    """Its health check has a mistake."""

    def check_health(self) -> None:
        if self.num_requests:
            raise KeyError("no such engine")


async def test_an_engine_whose_health_check_fails_is_taken_for_dead_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Healing(Confused):
        async def aclose(self) -> None:
            self.num_requests = 0
            await super().aclose()

    backend, lives = Healing(), asyncio.Event()
    deaths: list[EngineDeadError] = []
    monkeypatch.setattr("streamrag.serve.engine_watch.CHECK_S", 0)

    class Guarded:
        wants_engine = True
        engine_died = deaths.append
        engine_restarted = lives.set

    watch = EngineWatch(backend, RestartBudget(1, 60.0), Guarded())
    await backend.start(lambda line: None)
    watching = asyncio.create_task(watch.run(lambda line: None))
    backend.num_requests = 1
    async with asyncio.timeout(120):
        await lives.wait()
        backend.num_requests = 1
        await watch.given_up.wait()  # once is what was allowed
    await watching
    assert [str(error) for error in deaths] == ["its health check failed: 'no such engine'"] * 2
    assert (watch.num_restarts, backend.is_started) == (1, True)
    assert "KeyError" in caplog.text


async def test_an_engine_that_was_given_up_is_no_longer_being_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Confused):
        async def start(self, progress: Progress) -> None:
            if self.num_requests:
                raise BackendError("no memory")
            await super().start(progress)

    monkeypatch.setattr("streamrag.serve.engine_watch.CHECK_S", 0)
    monkeypatch.setattr("streamrag.serve.engine_watch.FIRST_BACKOFF_S", 0)
    async with serving(backend=Broken(), restarts=RestartBudget(2)) as served:
        served.service.backend.num_requests = 1  # type: ignore[attr-defined]
        async with asyncio.timeout(120):
            await served.service.dead.wait()
        answer = await served.http.get("/readyz")
        assert answer.status_code == 503
        assert "the engine is not running" in answer.text


async def test_a_service_whose_engine_cannot_tell_whether_it_lives_is_not_ready() -> None:
    async with serving(backend=Confused(is_endless=True)) as served:
        assert (await served.http.get("/readyz")).status_code == 200
        answer = await served.http.post("/v1/ask", json={"question": "What?"})
        assert '"engine_dead"' in answer.text
        async with asyncio.timeout(120):
            await served.service.dead.wait()
        assert (await served.http.get("/readyz")).status_code == 503
