"""Graceful shutdown: which calls are served, and when the router can exit."""

from router.front.drain import Drain
from tests.support.running import CHAT, chat, running_router
from tests.support.scripted_engine import scripted_engine


def test_draining_is_over_after_the_last_call_or_the_timeout() -> None:
    """Draining lasts from its begin until no call is in flight or the time is over."""
    now = 0.0
    drain = Drain(10.0, lambda: now)

    def over() -> bool:
        return drain.over

    assert not over()
    drain.calls = 1
    drain.begin()
    assert drain.begun
    now = 9.9
    assert not over()
    now = 10.0
    assert over()
    drain.calls, now = 0, 5.0
    assert over()


def test_a_drain_with_a_delay_refuses_nothing_until_it_is_over() -> None:
    """It is not ready from its begin, refuses later, and then gives calls in flight their whole time."""
    now = 0.0
    drain = Drain(10.0, lambda: now, delay=2.0)
    assert not drain.refuses
    drain.begin()
    assert (drain.begun, drain.refuses, drain.over) == (True, False, False)
    now = 2.0
    assert (drain.refuses, drain.over) == (True, True)
    drain.calls, now = 1, 11.9
    assert not drain.over
    now = 12.0
    assert drain.over


async def test_requests_that_wait_when_draining_begins_are_served() -> None:
    """While the router drains, only later calls are refused, `/ready` is 503, and the control plane still answers."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=1, window="fixed") as router:
        async with router.post(chat()) as first, router.post(chat()) as second:
            call = await engine.call()
            while router.scheduler.waiting == 0:
                await router.get_json("/health")
            router.drain.begin()
            async with router.post(chat()) as late:
                assert (await late.response()).status == 503
            async with router.http.get("/ready") as ready:
                assert ready.status == 503
            assert await router.get_json("/health") == {"status": "ok"}
            assert not router.drain.over
            await call.answer()
            assert (await first.response()).status == 200
            await (await engine.call()).answer()
            assert (await second.response()).status == 200
            await first.read()
            await second.read()
        async with router.http.get(CHAT) as response:
            assert response.status == 503
        await router.check_at_rest()
        assert router.drain.over
