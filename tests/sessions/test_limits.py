"""How many sessions a pipeline has open, of each tenant and of all."""

import asyncio

import pytest

from streamrag import ConfigurationError, Pipeline, PipelineClosedError, PromptTooLongError, TooManySessionsError
from streamrag.sessions import SessionLimits
from streamrag.testing import ScriptedSource
from tests.sessions.test_session import Engine, settled


async def refused(pipeline: Pipeline, tenant: str, window_tokens: int) -> str:
    """By which limit one session more is."""
    with pytest.raises(TooManySessionsError, match=r"session|tokens") as raised:
        await pipeline.session(tenant=tenant, window_tokens=window_tokens).start()
    assert repr(tenant) in str(raised.value) or not raised.value.limit.startswith("client_")
    return raised.value.limit


async def test_sessions_and_their_tokens_are_limited_per_tenant_and_in_all() -> None:
    limits = SessionLimits(max_sessions=3, max_sessions_per_tenant=2, max_tokens=2000, max_tokens_per_tenant=1000)
    async with Pipeline(ScriptedSource([]), Engine(answer="yes"), session_limits=limits) as pipeline:
        for _ in range(3):  # those that cannot be opened count for nothing
            with pytest.raises(PromptTooLongError):
                await pipeline.session(tenant="alice", window_tokens=10**9).start()
        async with pipeline.session(tenant="alice", window_tokens=600) as one:
            assert await refused(pipeline, "alice", 401) == "client_session_tokens"
            async with pipeline.session(tenant="alice", window_tokens=400):
                assert await refused(pipeline, "alice", 1) == "client_sessions"
                await one.append("others go on")
                await settled(one)
                async with pipeline.session(tenant="bob", window_tokens=900):
                    assert await refused(pipeline, "carol", 1) == "sessions"
                    await one.aclose()
                    assert await refused(pipeline, "carol", 701) == "session_tokens"
                    async with pipeline.session(tenant="carol", window_tokens=700):
                        pass


async def test_a_pipeline_without_limits_opens_sessions() -> None:
    async with Pipeline(ScriptedSource([]), Engine(answer="yes")) as pipeline, pipeline.session(tenant="a") as session:
        assert await session.append("one") == 1
        async with pipeline.session(tenant="a") as another:
            assert await another.append("one") == 1


async def test_sessions_end_with_their_pipeline() -> None:
    engine = Engine(answer="yes")
    pipeline = Pipeline(ScriptedSource([]), engine)
    await pipeline.start()
    session, late = pipeline.session(), pipeline.session()
    await session.start()
    await session.append("one")
    watch = session.watch("Any?")
    await watch.at_least(1)
    await pipeline.aclose()
    assert engine.num_requests == 0
    with pytest.raises(PipelineClosedError):
        await session.append("two")
    with pytest.raises(PipelineClosedError):
        await watch.at_least(2)
    with pytest.raises(PipelineClosedError):
        await late.start()
    assert len(asyncio.all_tasks()) == 1, "nothing tries again"


def test_limits_are_checked() -> None:
    for options in ({"max_sessions": -1}, {"max_tokens": 0.5}, {"max_tokens_per_tenant": True}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            SessionLimits(**options)
