"""I/O: vLLM's NixlConnector: the decode engine reads the KV of a prompt from the prefill engine, which holds it.

After `kv_connector/v1/nixl` of vLLM 0.32. A prefill answers with parameters, which a router passes on to any decode
engine. While such a request is in the decode engine's scheduler, heartbeats renew the lease. Once its memory is
allocated, it reads the blocks and notifies, which releases them. A request that the decode engine refuses, or that
leaves before its memory is allocated, notifies at once. But if nothing has passed between the two engines yet, they
shake hands first, and the notification waits for the decode engine's next step, however long that takes (both seen on
two servers).

Left out: the time of that handshake (about 4 s), several tensor-parallel ranks, and host buffers.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from uuid import uuid4
from zlib import crc32

from workers.api.call import ApiError, Body
from workers.api.choice import Choice
from workers.api.http import Routes
from workers.dialects.kv_transfer import RemotePrefill, handed_off, remote_prefill, transfer_params
from workers.engine.transfer.leases import Leases
from workers.engine.vllm_engine import VllmEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop, Mailbox
from workers.server.transfer.exchange import Exchange, Message, Unreachable
from workers.server.transfer.legs import NO_LEG, Leg
from workers.server.transfer.pulls import Pull, Pulls, TransferTimes, Waiting

RENEWALS_PER_LEASE: Final = 6


class SideChannel(NamedTuple):
    """Where other engines reach this one."""

    host: str
    port: int


class NixlConnector:
    """The connector of one worker, for all its data-parallel ranks."""

    def __init__(
        self,
        engines: Sequence[VllmEngine],
        loop: EngineLoop,
        clock: EmulatedClock,
        exchange: Exchange,
        side: SideChannel,
        *,
        lease: float,
        times: TransferTimes,
        recompute: bool,
    ) -> None:
        """`lease`: seconds. `recompute`: a prompt whose KV cannot be read is computed, and does not fail."""
        base = uuid4().hex
        self.engine_ids = [base] if len(engines) == 1 else [f"{base}_dp{rank}" for rank in range(len(engines))]
        self.leases = [Leases(engine, lease) for engine in engines]
        self.engines, self.loop, self.clock, self.exchange = engines, loop, clock, exchange
        self.times, self.recompute = times, recompute
        self.renewal = lease / RENEWALS_PER_LEASE
        self._side = side
        self.pulls = Pulls(engines)
        self._known: set[str] = set()
        self._notices: list[RemotePrefill] = []
        self._renewed: dict[str, RemotePrefill] = {}
        self._next_heartbeat = 0.0
        self._heartbeat: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        loop.call_after_steps(self._after_step)

    def leg(self, body: Body, _headers: Mapping[str, str], _path: str) -> Leg:
        """Return the leg of a call. Raises ApiError if its parameters are no object."""
        params = transfer_params(body)
        if params.get("do_remote_decode"):
            return PrefillLeg(self)
        remote = remote_prefill(params)
        return NO_LEG if remote is None else DecodeLeg(self, remote)

    async def answer(self, question: Message) -> Message:
        """Answer a decode engine."""
        engine, kind = question.get("engine"), question.get("kind")
        if engine not in self.engine_ids:
            return {"known": False}
        leases, now = self.leases[self.engine_ids.index(str(engine))], self.clock.now()
        request_id = str(question.get("request"))
        right = True
        if kind == "renew":
            leases.renew([request_id], now)
        elif kind == "read":
            right = leases.read(request_id, now)
        else:
            leases.release(request_id, now)
        self.loop.wake()
        return {"known": True, "right": right}

    def routes(self) -> Routes:
        """Return no routes: a router has nothing to ask here."""
        return {}

    async def close(self) -> None:
        """Stop what is under way."""
        if self._expiry is not None:
            self._expiry.cancel()
        await self.pulls.close()

    def offer(self, rank: int, request_id: str, choice: Choice) -> dict[str, object] | None:
        """Return the parameters of a hand-off, None if the engine does not hold it."""
        blocks = self.leases[rank].blocks(request_id)
        if not blocks:
            return None
        host, port = self._side
        return handed_off(
            self.engine_ids[rank], request_id, host, port, blocks, len(choice.prompt), choice.cached_tokens
        )

    def renew(self, request_id: str, remote: RemotePrefill) -> None:
        """Renew the lease of a request's KV from now on. The heartbeats of all requests go out together."""
        self._renewed[request_id] = remote
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = self.pulls.start(self._send_heartbeats())

    def renew_no_more(self, request_id: str) -> None:
        """Note that the KV of a request has come, or is not wanted."""
        self._renewed.pop(request_id, None)

    def notify(self, remote: RemotePrefill) -> None:
        """Have the prefill engine release a hand-off: now, or after the next step if the engines are strangers."""
        if remote.engine in self._known:
            self.pulls.start(self._tell("release", remote))
        else:
            self._known.add(remote.engine)
            self._notices.append(remote)

    def note_read(self, remote: RemotePrefill) -> None:
        """Note that this engine has read from the prefill engine."""
        self._known.add(remote.engine)

    def expire(self) -> None:
        """End leases that are over."""
        now = self.clock.now()
        for leases in self.leases:
            leases.expire(now)
        self.loop.wake()
        self._await_expiry()

    def _after_step(self) -> None:
        now = self.clock.now()
        for engine, leases in zip(self.engines, self.leases, strict=True):
            for request_id in engine.take_held():
                leases.begin(request_id, now)
                self._await_expiry()
        self.pulls.note_allocated()
        notices, self._notices = self._notices, []
        for remote in notices:
            self.pulls.start(self._tell("release", remote))

    def _await_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        ends = [end for leases in self.leases if (end := leases.next_end) is not None]
        if ends:
            delay = self.clock.real(max(0.0, min(ends) - self.clock.now()))
            self._expiry = asyncio.get_running_loop().call_later(delay, self.expire)

    async def _send_heartbeats(self) -> None:
        while self._renewed:
            wait = self._next_heartbeat - self.clock.now()
            if wait > 0:
                await asyncio.sleep(self.clock.real(wait))
                continue
            self._next_heartbeat = self.clock.now() + self.renewal
            for remote in self._renewed.values():
                self.pulls.start(self._tell("renew", remote))

    async def _tell(self, kind: str, remote: RemotePrefill) -> None:
        with suppress(Unreachable):
            await self.exchange.ask(remote.address, question(kind, remote))


def question(kind: str, remote: RemotePrefill) -> Message:
    """Return a question about one hand-off."""
    return {"kind": kind, "engine": remote.engine, "request": remote.request_id}


class PrefillLeg(Leg):
    """A call whose KV is kept for a decode engine."""

    hands_off = True

    def __init__(self, connector: NixlConnector) -> None:
        self._connector = connector

    async def end(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Add the parameters for the decode engine to the answer."""
        for choice, request_id, rank in zip(choices, mailbox.ids, mailbox.ranks, strict=True):
            choice.transfer = self._connector.offer(rank, request_id, choice)

    def spoil(self, mailbox: Mailbox) -> None:
        """End the leases, and let the blocks be reused."""
        for request_id, rank in zip(mailbox.ids, mailbox.ranks, strict=True):
            self._connector.leases[rank].spoil(request_id)


class DecodeLeg(Leg):
    """A call whose KV is read from a prefill engine."""

    pulls = True

    def __init__(self, connector: NixlConnector, remote: RemotePrefill) -> None:
        self._connector = connector
        self._remote = remote

    def refuse(self) -> None:
        """Release the KV that nobody will read."""
        self._connector.notify(self._remote)

    def submit(self, mailbox: Mailbox, _choices: Sequence[Choice]) -> None:
        """Begin to renew the lease."""
        for request_id, rank in zip(mailbox.ids, mailbox.ranks, strict=True):
            waiting = Waiting(self._connector.engines[rank], request_id, mailbox)
            self._connector.pulls.begin(NixlPull(self._connector, self._remote, waiting))

    def close(self, mailbox: Mailbox) -> None:
        """Release the KV of requests that have got no memory."""
        for request_id in mailbox.ids:
            if self._connector.pulls.end(request_id) is not None:
                self.refuse()


class NixlPull(Pull):
    """The way of one request's KV from the prefill engine to this one."""

    def __init__(self, connector: NixlConnector, remote: RemotePrefill, waiting: Waiting) -> None:
        super().__init__(waiting)
        self._connector = connector
        self._remote = remote

    async def run(self) -> None:
        """Renew the lease until there is memory and the blocks are read; then let the request go on."""
        connector, request_id = self._connector, self.waiting.request_id
        connector.renew(request_id, self._remote)
        try:
            await self.allocated.wait()
            if not self.dropped:
                await self._read()
        finally:
            connector.renew_no_more(request_id)
        connector.loop.wake()

    async def _read(self) -> None:
        """Read the blocks, also if the request has gone meanwhile: that releases them."""
        connector, remote = self._connector, self._remote
        engine, request_id, _ = self.waiting
        await connector.clock.work(connector.times.of(engine.tokens_to_pull(request_id)))
        try:
            answer = await connector.exchange.ask(remote.address, question("read", remote))
        except Unreachable:
            answer = {"known": False}
        if not answer.get("known"):
            connector.leases[connector.engines.index(engine)].failed += 1
            self._fail()
        else:
            connector.note_read(remote)
            damage = 0 if answer.get("right") else crc32(f"{remote.engine} {remote.request_id}".encode()) + 1
            engine.loaded(request_id, remote.cached_tokens, damage)

    def _fail(self) -> None:
        """Do what `kv_load_failure_policy` says."""
        engine, request_id, mailbox = self.waiting
        if self._connector.recompute:
            engine.recompute(request_id)
        elif engine.tokens_to_pull(request_id):
            self._connector.loop.fail(mailbox, ApiError(500, "Internal server error", "InternalServerError"))
