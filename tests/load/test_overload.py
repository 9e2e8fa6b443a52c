"""An overloaded fleet: which requests are refused, of which client, and what the refused clients receive."""

import pytest

from tests.support.running import chat, running_router
from tests.support.scripted_engine import scripted_engine

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@STREAMED
async def test_a_flood_costs_the_flooder(stream: bool) -> None:
    """The newest request of the client with the longest queue is dropped, uncharged; the light client is served."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, max_queued=2, heartbeat=0) as router,
        router.post(chat("one", user="flood", stream=stream)) as first,
    ):
        call = await engine.call()
        async with router.post(chat("two", user="flood", stream=stream)) as second:
            await router.until_waiting(1)
            async with router.post(chat("three", user="flood", stream=stream)) as third:
                await router.until_waiting(2)
                async with router.post(chat("four", user="light", stream=stream)) as light:
                    refused = await third.response()
                    assert refused.status == 429
                    assert refused.headers["x-d2lpm-dropped-reason"] == "rejected-displaced"
                    assert int(refused.headers["retry-after"]) >= 1
                    assert (await refused.json())["error"]["type"] == "rate_limit_error"
                    await call.answer()
                    for _ in range(2):
                        await (await engine.call()).answer()
                    for post in (first, second, light):
                        assert (await post.response()).status == 200
        assert engine.calls.empty()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_queued_per_client": 1}, "rejected-client-saturated"),
        ({"max_queued_bytes_per_client": 100}, "rejected-client-saturated"),
        ({"max_queued_bytes": 100}, "rejected-saturated"),
    ],
)
async def test_each_limit_refuses_with_its_reason(limits: dict[str, int], reason: str) -> None:
    """A second request in the queue exceeds the limit, by number or by size, and its error names the limit."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, **limits) as router,
        router.post(chat()) as first,
    ):
        call = await engine.call()
        async with router.post(chat()) as second:
            await router.until_waiting(1)
            async with router.post(chat()) as third:
                refused = await third.response()
                assert (refused.status, refused.headers["x-d2lpm-dropped-reason"]) == (429, reason)
            await call.answer()
            await (await engine.call()).answer()
            assert [(await post.response()).status for post in (first, second)] == [200, 200]
