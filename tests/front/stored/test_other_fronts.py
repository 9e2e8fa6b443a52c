"""A stored response is known to every front before its client learns its id."""

import asyncio

import pytest

from router.channel.client import SchedulerClient
from router.channel.local import connect
from router.channel.messages import Ask, FindResponse, FrontMessage, ResponseStored
from router.core.model.request import ClientId
from tests.support.running import RunningRouter, running_router
from tests.support.scripted_engine import scripted_engine
from tests.support.stored_scripts import RESPONSES, completed, created, encoded

ANN = {"authorization": "Bearer ann"}


class SlowChannel:
    """A front's channel that keeps back what is sent after a response was stored, until it is released."""

    def __init__(self, router: RunningRouter) -> None:
        client = router.scheduler_client
        self._link = router.scheduler_host.connect(client.receive)
        self._kept: list[FrontMessage] | None = None
        self.asked = asyncio.Event()
        """Set when a question is kept back."""
        client.connect(self._send)

    def _send(self, message: FrontMessage) -> None:
        if isinstance(message, ResponseStored):
            self._kept = []
        if self._kept is None:
            self._link.receive(message)
            return
        self._kept.append(message)
        if isinstance(message, Ask):
            self.asked.set()

    def release(self) -> None:
        """Send what was kept back, and all later messages at once."""
        kept, self._kept = self._kept or [], None
        for message in kept:
            self._link.receive(message)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_learns_an_id_only_when_every_front_finds_it(*, stream: bool) -> None:
    """A slow report delays the answer: the client may get or cancel its response through another front at once."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        channel = SlowChannel(router)
        other_front = SchedulerClient(router.scheduler_host.clock)
        connect(other_front, router.scheduler_host)
        async with router.post({"model": "m", "input": "Hi", "stream": stream}, RESPONSES, **ANN) as post:
            call = await engine.call()
            [ann] = (await router.fairness())["clients"]
            if stream:
                await call.begin()
                await call.write(created("resp_1"))
            else:
                await call.respond(200, encoded("resp_1"))
            answer, asked = asyncio.ensure_future(post.response()), asyncio.ensure_future(channel.asked.wait())
            await asyncio.wait({answer, asked}, return_when=asyncio.FIRST_COMPLETED)
            await router.fairness()  # an answer that does not wait arrives before this one
            assert not answer.done()
            assert await other_front.ask(FindResponse("resp_1", ClientId(ann))) is None
            channel.release()
            await answer
            assert await other_front.ask(FindResponse("resp_1", ClientId(ann))) is not None
            if stream:
                await call.write(completed("resp_1"))
                await call.end()
            await post.read()
