"""I/O: SGLang's disaggregation: both legs of a request are sent at once, and meet in a room of the prefill server.

After `sglang/srt/disaggregation` of 0.5.23. The decode leg gets memory and joins the room; only then does the prefill
leg compute its prompt. It sends the KV, and its answer ends, with one token. A leg does not learn that the other was
aborted: it waits until its own time is over. A decode leg whose prefill server is gone fails after two heartbeats. Two
requests in one room are not told apart: both get the KV that was offered last.

Left out: the native /generate, warm-up requests, and the role switch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from workers.api.call import ApiError, Body
from workers.api.choice import Choice
from workers.api.http import Routes
from workers.dialects.bootstrap import Room, Rooms, prefill_rank, rooms
from workers.engine.sglang_engine import SglangEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop, Mailbox
from workers.server.transfer.exchange import Exchange, Message, Unreachable
from workers.server.transfer.legs import EngineDied, Leg
from workers.server.transfer.meetings import Meetings, Offer, unless_interrupted
from workers.server.transfer.pulls import Pull, Pulls, TransferTimes, Waiting, fingerprint

HEARTBEAT: Final = 5.0
FAILED_HEARTBEATS: Final = 2


class BootstrapConnector:
    """The connector of one SGLang worker, a prefill or a decode server, for all its data-parallel ranks."""

    def __init__(
        self,
        engines: Sequence[SglangEngine],
        loop: EngineLoop,
        clock: EmulatedClock,
        exchange: Exchange,
        *,
        prefills: bool,
        times: TransferTimes,
        patience: float,
    ) -> None:
        """`prefills`: whether it is a prefill server. `patience`: seconds that a leg waits for the other."""
        self.engines, self.loop, self.clock, self.exchange = engines, loop, clock, exchange
        self.times, self.patience = times, patience
        self.meetings = Meetings()
        self.pulls = Pulls(engines)
        self._prefills = prefills
        loop.call_after_steps(self.pulls.note_allocated)

    def leg(self, body: Body, headers: Mapping[str, str], path: str) -> Leg:
        """Return the leg of a call.

        Raises ApiError 400 if it names no room, and EngineDied if it should choose the rank of a prefill by it: an
        assertion of the controller fails then.
        """
        where = rooms(body, headers, path)
        if self._prefills:
            if where.numbers is None and len(self.engines) > 1:
                raise EngineDied
            return PrefillLeg(self, where)
        return DecodeLeg(self, where, prefill_rank(body))

    async def answer(self, question: Message) -> Message:
        """Answer a decode server that has memory for a request."""
        room = int(str(question.get("room")))
        offer = await self.meetings.wait_for_offer(str(room))
        named = question.get("rank")
        if offer is None or offer.rank != (room % len(self.engines) if named is None else named):
            return {"pending": True}
        return {"pending": False, "fingerprint": offer.fingerprint, "cached_tokens": offer.cached_tokens}

    def routes(self) -> Routes:
        """Return no routes: a router has nothing to ask here."""
        return {}

    async def close(self) -> None:
        """Stop what is under way."""
        await self.pulls.close()


def failed(leg: str, number: int, reason: str) -> ApiError:
    """Return what a leg answers whose other leg has not done its part."""
    message = (
        f"{leg} failed for request rank=0 bootstrap_room={number} with exception "
        f"KVTransferError(bootstrap_room={number}): {reason}"
    )
    return ApiError(500, message, "InternalServerError")


def timed_out(leg: str, number: int, state: str, seconds: float) -> ApiError:
    """Return what a leg answers whose partner never came."""
    return failed(leg, number, f"Request {number} timed out after {seconds:.1f}s in KVPoll.{state}")


class PrefillLeg(Leg):
    """A call that computes prompts and sends their KV."""

    hands_off = True
    prefill_only = True

    def __init__(self, connector: BootstrapConnector, where: Rooms) -> None:
        self._connector = connector
        self._where = where
        self.rank = where.first() % len(connector.engines)

    async def begin(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Wait until the decode legs have joined. Raises ApiError 500 if they have not in time."""
        connector = self._connector
        for room in self._where.of(len(choices)):
            joined = connector.meetings.at(str(room.number)).joined.wait()
            try:
                if not await unless_interrupted(joined, mailbox, connector.clock, connector.patience):
                    return
            except TimeoutError as error:
                raise timed_out("Prefill bootstrap", room.number, "Bootstrapping", connector.patience) from error

    async def end(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Send the KV. If the call is aborted meanwhile, its answer is as if it had been sent."""
        connector = self._connector
        for choice, room, rank in zip(choices, self._where.of(len(choices)), mailbox.ranks, strict=True):
            if choice.finish == "abort":
                continue
            sent = connector.clock.work(connector.times.of(len(choice.prompt)))
            if not await unless_interrupted(sent, mailbox, connector.clock, float("inf")):
                continue
            offer = Offer(fingerprint(choice.prompt), rank, choice.cached_tokens, len(choice.prompt))
            connector.meetings.at(str(room.number)).make(offer)

    def close(self, mailbox: Mailbox) -> None:
        """Release the KV, sent or not."""
        for request_id, rank in zip(mailbox.ids, mailbox.ranks, strict=True):
            self._connector.engines[rank].release_held(request_id)
        self._connector.loop.wake()


class DecodeLeg(Leg):
    """A call whose KV comes from a prefill server."""

    pulls = True

    def __init__(self, connector: BootstrapConnector, where: Rooms, prefill_rank: int | None) -> None:
        self._connector = connector
        self._where = where
        self._prefill_rank = prefill_rank
        where.first()

    def submit(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Join the rooms once there is memory."""
        rooms = self._where.of(len(choices))
        for choice, room, request_id, rank in zip(choices, rooms, mailbox.ids, mailbox.ranks, strict=True):
            waiting = Waiting(self._connector.engines[rank], request_id, mailbox)
            pull = RoomPull(self._connector, room, self._prefill_rank, fingerprint(choice.prompt), waiting)
            self._connector.pulls.begin(pull)

    def close(self, mailbox: Mailbox) -> None:
        """Stop waiting."""
        for request_id in mailbox.ids:
            self._connector.pulls.end(request_id)


class RoomPull(Pull):
    """One decode request in its room."""

    def __init__(
        self, connector: BootstrapConnector, room: Room, prefill_rank: int | None, prompt: int, waiting: Waiting
    ) -> None:
        super().__init__(waiting)
        self._connector = connector
        self._room = room
        self._prefill_rank = prefill_rank
        self._prompt = prompt

    async def run(self) -> None:
        """Wait in the room for the KV."""
        connector = self._connector
        engine, request_id, mailbox = self.waiting
        await self.allocated.wait()
        if self.gone:
            return
        try:
            async with asyncio.timeout(connector.clock.real(connector.patience)):
                answer = await self._wait_for_offer()
        except TimeoutError:
            error = timed_out("Decode transfer", self._room.number, "WaitingForInput", connector.patience)
            connector.loop.fail(mailbox, error)
            return
        if answer is None:
            reason = f"Lost connection with prefill instance (bootstrap_addr: {self._room.host}:{self._room.port})"
            connector.loop.fail(mailbox, failed("Decode transfer", self._room.number, reason))
            return
        cached = answer.get("cached_tokens")
        damage = 0 if answer.get("fingerprint") == self._prompt else self._room.number + 1
        engine.loaded(request_id, cached if isinstance(cached, int) else None, damage)
        connector.loop.wake()

    async def _wait_for_offer(self) -> Message | None:
        """Return what is offered, None if the prefill server is gone."""
        failures = 0
        question = {"room": self._room.number, "rank": self._prefill_rank}
        while not self.gone:
            try:
                answer = await self._connector.exchange.ask(self._room.address, question)
            except Unreachable:
                failures += 1
                if failures == FAILED_HEARTBEATS:
                    return None
                await asyncio.sleep(self._connector.clock.real(HEARTBEAT))
                continue
            if not answer.get("pending"):
                return answer
        return None
