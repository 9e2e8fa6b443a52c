"""I/O: vLLM's MooncakeConnector: the prefill engine sends the KV of a prompt to the decode engine that asks for it.

After `kv_connector/v1/mooncake` of vLLM 0.32. The router makes up a transfer id for both calls, which may be sent at
once; the answer of a prefill says nothing. The decode engine finds the prefill engine at its bootstrap server and waits
until the prompt is computed. What no decode engine asks for is released after a time, or once a decode engine has
refused its call; a prefill that ends with the end-of-sequence token is released at once, and its decode engine waits in
vain.

Left out: several tensor-parallel ranks, and the registration of ranks on other machines.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from uuid import uuid4

from workers.api.call import ApiError, Body
from workers.api.choice import Choice
from workers.api.http import HttpRequest, Response, Routes, json_response
from workers.dialects.kv_transfer import PushedPrefill, pushed_prefill, transfer_params
from workers.engine.vllm_engine import VllmEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop, Mailbox
from workers.server.transfer.exchange import Exchange, Message, Unreachable
from workers.server.transfer.legs import NO_LEG, Leg
from workers.server.transfer.meetings import Meetings, Offer
from workers.server.transfer.pulls import Pull, Pulls, TransferTimes, Waiting, fingerprint


class MooncakeConnector:
    """The connector of one worker, for all its data-parallel ranks."""

    def __init__(
        self,
        engines: Sequence[VllmEngine],
        loop: EngineLoop,
        clock: EmulatedClock,
        exchange: Exchange,
        address: str,
        *,
        times: TransferTimes,
        patience: float,
        recompute: bool,
    ) -> None:
        """`address`: of the bootstrap server. `patience`: seconds after which one side gives the other up.
        `recompute`: a prompt whose KV does not come is computed, and does not fail.
        """
        base = uuid4().hex
        self.engine_ids = [base] if len(engines) == 1 else [f"{base}_dp{rank}" for rank in range(len(engines))]
        self.engines, self.loop, self.clock, self.exchange = engines, loop, clock, exchange
        self.times, self.patience, self.recompute = times, patience, recompute
        self.pulls = Pulls(engines)
        self._address = address
        self._meetings = Meetings()
        self._offered: dict[str, tuple[int, str]] = {}
        loop.call_after_steps(self.pulls.note_allocated)

    def leg(self, body: Body, _headers: Mapping[str, str], _path: str) -> Leg:
        """Return the leg of a call. Raises ApiError if its parameters are no object."""
        params = transfer_params(body)
        transfer_id = params.get("transfer_id")
        if params.get("do_remote_decode") and isinstance(transfer_id, str):
            return PrefillLeg(self, transfer_id)
        remote = pushed_prefill(params)
        return NO_LEG if remote is None else DecodeLeg(self, remote)

    async def answer(self, question: Message) -> Message:
        """Send the KV that a decode engine asks for, if it is there."""
        engine, key = question.get("engine"), str(question.get("transfer"))
        if engine not in self.engine_ids:
            return {"known": False}
        rank = self.engine_ids.index(str(engine))
        if question.get("release"):
            self.release(f"{rank} {key}")
            return {"known": True}
        offer = await self._meetings.wait_for_offer(f"{rank} {key}")
        if offer is None:
            return {"known": True, "pending": True}
        await self.clock.work(self.times.of(offer.tokens))
        self.release(f"{rank} {key}")
        return {
            "known": True,
            "pending": False,
            "fingerprint": offer.fingerprint,
            "cached_tokens": offer.cached_tokens,
        }

    async def tell_unwanted(self, remote: PushedPrefill) -> None:
        """Have a prefill engine release what nobody will ask for."""
        with suppress(Unreachable):
            question = {"engine": remote.engine, "transfer": remote.transfer_id, "release": True}
            await self.exchange.ask(remote.address, question)

    def routes(self) -> Routes:
        """Return what the bootstrap server answers: the engine of each rank."""
        return {("GET", "/query"): self._query}

    async def close(self) -> None:
        """Stop what is under way."""
        await self.pulls.close()

    def offer(self, transfer_id: str, rank: int, request_id: str, choice: Choice) -> None:
        """Hold a prompt's KV for the decode engine that will ask for it, for a time."""
        key = f"{rank} {transfer_id}"
        self._offered[key] = (rank, request_id)
        offer = Offer(fingerprint(choice.prompt), rank, choice.cached_tokens, len(choice.prompt))
        self._meetings.at(key).make(offer)
        asyncio.get_running_loop().call_later(self.clock.real(self.patience), self.release, key)

    def keep_in_vain(self, rank: int, request_id: str) -> None:
        """Hold a prompt's KV that nobody will ask for, for the same time."""
        asyncio.get_running_loop().call_later(self.clock.real(self.patience), self._release_held, rank, request_id)

    def _release_held(self, rank: int, request_id: str) -> None:
        if self.engines[rank].release_held(request_id):
            self.loop.wake()

    def release(self, key: str) -> None:
        """Release a prompt's KV, if it is held."""
        rank, request_id = self._offered.pop(key, (0, ""))
        if self.engines[rank].release_held(request_id):
            self._meetings.forget(key)
            self.loop.wake()

    def _query(self, _request: HttpRequest) -> Response:
        entries = {
            str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": self._address}}}
            for rank, engine_id in enumerate(self.engine_ids)
        }
        return json_response(entries)


class PrefillLeg(Leg):
    """A call whose KV is kept for a decode engine."""

    hands_off = True

    def __init__(self, connector: MooncakeConnector, transfer_id: str) -> None:
        self._connector = connector
        self._transfer_id = transfer_id
        self._spoilt = self._ended = False

    async def end(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Offer the KV, unless the prompt's answer has ended."""
        self._ended = True
        for choice, request_id, rank in zip(choices, mailbox.ids, mailbox.ranks, strict=True):
            if choice.finish == "length" and not self._spoilt:
                self._connector.offer(self._transfer_id, rank, request_id, choice)
            else:
                self._connector.engines[rank].release_held(request_id)

    def spoil(self, _mailbox: Mailbox) -> None:
        """Let the decode engine wait for a prompt that never comes."""
        self._spoilt = True

    def close(self, mailbox: Mailbox) -> None:
        """Give up the KV of a prompt whose call was cut when it had just been computed."""
        if not self._ended:
            for request_id, rank in zip(mailbox.ids, mailbox.ranks, strict=True):
                self._connector.keep_in_vain(rank, request_id)


class DecodeLeg(Leg):
    """A call whose KV comes from a prefill engine."""

    pulls = True

    def __init__(self, connector: MooncakeConnector, remote: PushedPrefill) -> None:
        self._connector = connector
        self._remote = remote

    def refuse(self) -> None:
        """Release the KV that nobody will ask for."""
        self._connector.pulls.start(self._connector.tell_unwanted(self._remote))

    def submit(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Ask for the KV once there is memory."""
        for choice, request_id, rank in zip(choices, mailbox.ids, mailbox.ranks, strict=True):
            waiting = Waiting(self._connector.engines[rank], request_id, mailbox)
            prompt = fingerprint(choice.prompt)
            self._connector.pulls.begin(PushedPull(self._connector, self._remote, prompt, waiting))

    def close(self, mailbox: Mailbox) -> None:
        """Stop waiting."""
        for request_id in mailbox.ids:
            self._connector.pulls.end(request_id)


class PushedPull(Pull):
    """One decode request that waits for what the prefill engine sends."""

    def __init__(self, connector: MooncakeConnector, remote: PushedPrefill, prompt: int, waiting: Waiting) -> None:
        super().__init__(waiting)
        self._connector = connector
        self._remote = remote
        self._prompt = prompt

    async def run(self) -> None:
        """Wait for the KV, and do what `kv_load_failure_policy` says if it does not come."""
        connector = self._connector
        engine, request_id, mailbox = self.waiting
        await self.allocated.wait()
        answer: Message | None = None
        try:
            async with asyncio.timeout(connector.clock.real(connector.patience)):
                answer = await self._wait()
        except (TimeoutError, Unreachable):
            pass
        if answer is not None:
            damage = 0 if answer.get("fingerprint") == self._prompt else self._prompt + 1
            cached = answer.get("cached_tokens")
            engine.loaded(request_id, cached if isinstance(cached, int) else None, damage)
        elif connector.recompute:
            engine.recompute(request_id)
        elif engine.tokens_to_pull(request_id):
            connector.loop.fail(mailbox, ApiError(500, "Internal server error", "InternalServerError"))
        connector.loop.wake()

    async def _wait(self) -> Message | None:
        """Return what the prefill engine has sent, None if it is not the one that was meant. Raises Unreachable."""
        question = {"engine": self._remote.engine, "transfer": self._remote.transfer_id}
        while not self.gone:
            answer = await self._connector.exchange.ask(self._remote.address, question)
            if not answer.get("known"):
                return None
            if not answer.get("pending"):
                return answer
        return None
