"""Ray Serve's own routers for streams."""

from typing import ClassVar

import pytest

pytest.importorskip("ray")

from ray.serve.request_router import RequestRouter
from ray_routers import PowerOfTwo, PrefixAffinity, StreamsOnly

from streamrag.backends.ray.deployment import engines
from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.ray.wire import Delta, Open
from streamrag.core import Prompt, SamplingParams
from streamrag.testing import ScriptedBackend
from tests.backends.ray.ray_calls import call_of, replica_of_ray, router_of

FIRST = Prompt((1, 2, 3), 0, is_complete=False, source_name="search")


async def test_a_router_of_rays_own_is_asked_for_streams_that_are_opened_and_for_no_other_call() -> None:
    class Other(RequestRouter):
        asked: ClassVar[list[object]] = []

        async def choose_replicas(self, candidate_replicas, pending_request=None):  # type: ignore[no-untyped-def]
            self.asked.append(pending_request.args[0].stream_id)
            return [candidate_replicas[1:]]

        def on_request_routed(self, pending_request, replica_id, result):  # type: ignore[no-untyped-def]
            self.asked.append(pending_request.args[0].stream_id)

    class OtherOfStreams(StreamsOnly, Other):
        pass

    router = router_of(OtherOfStreams)
    a, b = there = [replica_of_ray("a"), replica_of_ray("b")]
    opening = call_of(Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me"))
    assert await router.choose_replicas(there, opening) == [[b]]
    assert await router.choose_replicas(there, call_of("a", "1", None)) == [[a]]
    assert await router.choose_replicas(there, call_of("gone", "1", None)) == [there]
    assert await router.choose_replicas(there, call_of()) == [there]
    for call in (call_of("a", "me"), opening, call_of()):
        router.on_request_routed(call, None, None)
    assert Other.asked == ["1"] * 2


def test_rays_router_for_prefixes_reads_a_streams_first_prompt() -> None:
    opening = Open("1", Delta.of(FIRST, number=1, num_shared=0), SamplingParams(), "me")
    assert PrefixAffinity._extract_text_from_request(None, call_of(opening)) == "\x01\x02\x03"


@pytest.mark.parametrize("router", [PowerOfTwo, PrefixAffinity])
def test_rays_own_routers_can_be_given(router: type[RequestRouter]) -> None:
    deployed = engines(ScriptedBackend, ReplicaOptions(), router)._bound_deployment
    given = deployed._deployment_config.request_router_config.get_request_router_class()
    assert issubclass(given, RequestRouter)
    assert given.__name__ == router.__name__
