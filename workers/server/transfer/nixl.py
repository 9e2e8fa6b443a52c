"""I/O: vLLM's NixlConnector: the decode engine reads the KV of a prompt from the prefill engine, which holds it.

After `kv_connector/v1/nixl` of vLLM 0.32. A prefill answers with parameters, which a router passes on to any decode
engine. While such a request is in the decode engine's scheduler, heartbeats renew the lease. Once its memory is
allocated, it reads the blocks and notifies, which releases them. A request that the decode engine refuses, or that
leaves before its memory is allocated, notifies with the engine's next step, and not before.

Left out: the handshake of two engines (about 4 s, once), several tensor-parallel ranks, and host buffers.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
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

RENEWALS_PER_LEASE = 6


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
        self._notices: list[RemotePrefill] = []
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
        """Stop what is under way, and close connections."""
        if self._expiry is not None:
            self._expiry.cancel()
        await self.pulls.close()
        await self.exchange.close()

    def offer(self, rank: int, request_id: str, choice: Choice) -> dict[str, object] | None:
        """Return the parameters of a hand-off, None if the engine does not hold it."""
        blocks = self.leases[rank].blocks(request_id)
        if not blocks:
            return None
        host, port = self._side
        return handed_off(
            self.engine_ids[rank], request_id, host, port, blocks, len(choice.prompt), choice.cached_tokens
        )

    def notify(self, remote: RemotePrefill) -> None:
        """Have the prefill engine release a hand-off, after this engine's next step."""
        self._notices.append(remote)

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
            self.pulls.start(self._release(remote))

    def _await_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        ends = [end for leases in self.leases if (end := leases.next_end) is not None]
        if ends:
            delay = self.clock.real(max(0.0, min(ends) - self.clock.now()))
            self._expiry = asyncio.get_running_loop().call_later(delay, self.expire)

    async def _release(self, remote: RemotePrefill) -> None:
        with suppress(Unreachable):
            await self.exchange.ask(remote.address, question("release", remote))


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
        """Renew the lease until there is memory, read the KV, and let the request go on."""
        connector, remote = self._connector, self._remote
        engine, request_id, _ = self.waiting
        await self._renew_until_allocated()
        if self.gone and not engine.tokens_to_pull(request_id):
            return
        await connector.clock.work(connector.times.of(engine.tokens_to_pull(request_id)))
        try:
            answer = await connector.exchange.ask(remote.address, question("read", remote))
        except Unreachable:
            answer = {"known": False}
        if not answer.get("known"):
            self._fail()
        else:
            damage = 0 if answer.get("right") else crc32(f"{remote.engine} {remote.request_id}".encode()) + 1
            engine.loaded(request_id, remote.cached_tokens, damage)
        connector.loop.wake()

    async def _renew_until_allocated(self) -> None:
        connector = self._connector
        while not self.allocated.is_set():
            with suppress(Unreachable):
                await connector.exchange.ask(self._remote.address, question("renew", self._remote))
            with suppress(TimeoutError):
                async with asyncio.timeout(connector.clock.real(connector.renewal)):
                    await self.allocated.wait()

    def _fail(self) -> None:
        """Do what `kv_load_failure_policy` says."""
        engine, request_id, mailbox = self.waiting
        if self._connector.recompute:
            engine.recompute(request_id)
        elif engine.tokens_to_pull(request_id):
            self._connector.loop.fail(mailbox, ApiError(500, "Internal server error", "InternalServerError"))
