"""Live requests (arrived and not ended) and their attempts.

A request has one `RequestState` from its arrival to its end, and each visit to a worker is one `Attempt`. Each book
that counts an attempt (ledger, cache, load, gap bound, token blocks) has a record of its own for it. The records are
made once, at the dispatch, and passed by reference until the attempt ends; no book looks an attempt up by an id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from router.core.cache.cache_model import PinnedRun
from router.core.cache.prefix_map import Lookup
from router.core.clients.fairness import Outstanding
from router.core.clients.ledger import Bill
from router.core.clients.shares import Shares
from router.core.clients.turns import Turns
from router.core.clients.undelivered import UndeliveredCall
from router.core.fleet.in_flight import InFlight
from router.core.fleet.worker_state import WorkerState
from router.core.kv_blocks.token_blocks import ExpectedBlocks
from router.core.model.cost import Tokens
from router.core.model.events import ChargedRequest
from router.core.model.request import Leg, Request, RequestId, WorkerId
from router.core.policies.base import Policy


class Stage(Enum):
    """How far an attempt is; the table in `scheduler` says what moves it."""

    SENT = auto()
    """Its input is reserved."""
    STARTED = auto()
    """Its prefill is over and charged."""


class Attempt:
    """One visit of a request to a worker, from its dispatch to its end, with its record in each book."""

    __slots__ = ("bill", "blocks", "flight", "leg", "outstanding", "part", "run", "stage", "worker")

    def __init__(
        self,
        worker: WorkerState,
        bill: Bill,
        run: PinnedRun,
        flight: InFlight,
        outstanding: Outstanding,
        blocks: ExpectedBlocks | None,
        part: Request,
        leg: Leg,
    ) -> None:
        self.worker = worker
        self.bill = bill
        self.run = run
        """What it pins in the worker's cache."""
        self.flight = flight
        """Its share of the worker's load."""
        self.outstanding = outstanding
        """What it was expected to cost at its dispatch."""
        self.blocks = blocks
        """The token blocks that the worker will store for it; None if they are not known or not followed."""
        self.part = part
        """What the worker computes of the request, as the policy knows it."""
        self.stage: Stage = Stage.SENT
        self.leg = leg


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prompt that a prefill worker keeps for a decode worker."""

    worker: WorkerId
    since: float
    """When it was prefilled, in seconds."""
    outstanding: Outstanding
    """What is still to be computed of the request."""


class RequestState:
    """A request from its arrival to its end, across all its attempts."""

    __slots__ = (
        "answered",
        "attempt",
        "charged",
        "charged_output",
        "failed_workers",
        "handoff",
        "kept_in_vain",
        "lookup",
        "paid",
        "prefill",
        "request",
        "resumed_output",
        "suspects",
        "tries",
        "waiting_since",
    )

    def __init__(self, request: Request, waiting_since: float, lookup: Lookup) -> None:
        self.request = request
        self.waiting_since = waiting_since
        """When the request began to wait, for its first dispatch or for a retry, in seconds."""
        self.lookup = lookup
        """Its size and match."""
        self.attempt: Attempt | None = None
        """The present visit to a worker; None while the request waits."""
        self.prefill: Attempt | None = None
        """The visit to a prefill worker during that to the decode worker which waits for the prompt; else None."""
        self.handoff: Handoff | None = None
        """What a prefill worker keeps of the request, in the pool and during the attempt that decodes it; else None."""
        self.answered = False
        """Whether the answer has begun, as far as is known, since the request last began to wait for it."""
        self.charged: Tokens | None = None
        """Tokens charged for earlier attempts; None while the prompt is not charged."""
        self.failed_workers: tuple[WorkerId, ...] = ()
        """The workers that returned the request, except those that had no room."""
        self.tries = 0
        """How many of these had accepted the request: a failed connection attempt costs nothing and is not counted."""
        self.kept_in_vain: WorkerId | None = None
        """The prefill worker whose prompt a decode worker had when it answered an error: it may have been gone. The
        next prefill is at another worker if one has room."""
        self.suspects: tuple[WorkerId, ...] = ()
        """Those of the failed workers that are to blame if another worker completes the request."""
        self.charged_output = 0
        """Output tokens charged for earlier attempts."""
        self.resumed_output = 0
        """Output tokens from which the next worker continues; an answer that is not streamed begins again."""
        self.paid: UndeliveredCall | None = None
        """The call that this one repeats, whose front died."""

    @property
    def is_delivered(self) -> bool:
        """Whether a part of the answer may have been delivered. One that is not streamed comes whole, in the end."""
        if not self.request.streamed:
            return False
        started = self.attempt is not None and self.attempt.stage is Stage.STARTED
        return started or self.answered or self.resumed_output > 0

    def untried(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Return those of these workers that have not failed the request."""
        return [worker for worker in workers if worker not in self.failed_workers]

    def pay(self, call: UndeliveredCall) -> None:
        """Note that the client has paid for this call already, and received nothing."""
        self.paid, self.charged, self.charged_output = call, call.charged, call.charged.output

    def add_charged(self, tokens: Tokens) -> None:
        """Add what an attempt was charged, now that it has ended."""
        self.charged = tokens if self.charged is None else tokens.plus(self.charged)
        self.charged_output = self.charged.output
        if self.request.streamed:
            self.resumed_output = self.charged_output


def new_state(request: Request, now: float, carried: ChargedRequest | None = None) -> RequestState:
    """Return the state of a request that begins now, or goes on after an earlier run of the scheduler charged `carried`
    for it.
    """
    state = RequestState(request, now, Lookup(request))
    if carried is not None and carried.earlier is not None:
        state.add_charged(carried.earlier)
    return state


class RequestTable:
    """Opens and closes live requests, for all who count them."""

    def __init__(self, requests: dict[RequestId, RequestState], shares: Shares, turns: Turns, policy: Policy) -> None:
        """`requests`: the live requests, which nobody else changes."""
        self._states = requests
        self.states: Final[Mapping[RequestId, RequestState]] = requests
        self._shares = shares
        self._turns = turns
        self._policy = policy
        self._follows_calls = policy.properties.follows_calls

    def open_request(self, state: RequestState, now: float) -> None:
        """Count a request as live and waiting: when it arrives, and again when its worker returned it."""
        request = state.request
        self._states[request.id] = state
        state.answered = begun = state.resumed_output > 0
        weight = self._shares.add_request(request)
        if self._follows_calls:
            self._policy.call_began(request, now)
        if begun:
            self._turns.request_resumed(request.client, weight, now)
        else:
            self._turns.request_opened(request.client, request.id, weight, state.waiting_since, now)

    def close_request(self, request: Request, now: float) -> None:
        """Drop a request from the live ones; the last step of its end."""
        del self._states[request.id]
        self._turns.request_closed(request.client, request.id, now)
        if self._follows_calls:
            self._policy.call_ended(request, now)
        self._shares.remove_request(request.client)
