"""Requests that wait for their next attempt: a worker returned them, or has computed their prompt.

The policy owns a request until its first dispatch; between two attempts it waits here. Both kinds go before all queued
requests: prefilled ones first, as they do not keep, then returned ones, each kind first come, first served.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from router.core.books import Books
from router.core.clients.fairness import Fairness
from router.core.handoffs import HandoffPool, rest_beside, rest_of
from router.core.model.commands import Refusal
from router.core.model.request import Request, WorkerId
from router.core.policies.base import Choice, Policy
from router.core.requests import RequestState
from router.core.retries import RetryQueue, RetryWorkers
from router.core.scheduler_settings import SchedulerSettings

Outcome = tuple[RequestState, Choice | Refusal]
"""A request that waits here no longer, and the choice by which it is dispatched, or why it is rejected."""


class NextAttempts:
    """The returned and the prefilled requests, and the workers for them."""

    def __init__(self, settings: SchedulerSettings, books: Books, policy: Policy, fairness: Fairness) -> None:
        self._fleet = books.fleet
        self._view = books.view
        self._policy = policy
        self.handoffs: Final = HandoffPool(settings.handoff_seconds, fairness)
        self.retries: Final = RetryQueue(settings.health, settings.waiting.time_to_live)
        self._retry_workers = RetryWorkers(books.fleet)

    def __len__(self) -> int:
        return len(self.retries.requests) + len(self.handoffs)

    def __contains__(self, state: RequestState) -> bool:
        return state in self.retries.requests or state in self.handoffs

    def remove(self, state: RequestState) -> None:
        """Remove a request that waits here."""
        if state in self.handoffs:
            self.handoffs.remove(state)
        else:
            self.retries.remove(state)

    def prefill_again(self, state: RequestState) -> None:
        """Let a request be prefilled again, because what was kept of it is too old or gone."""
        state.handoff = None
        self.retries.add_lost(state)

    def worker_left(self, worker: WorkerId) -> None:
        """Give up the prompts that a prefill worker kept."""
        self._give_up(self.handoffs.kept_by(worker))

    def _give_up(self, lost: Iterable[RequestState]) -> None:
        for state in lost:
            self.handoffs.remove(state)
            self.prefill_again(state)

    def expired(self, now: float) -> list[RequestState]:
        """Return the returned requests whose time to live is over; they wait here until they are removed. Prompts that
        are too old to be decoded are given up.
        """
        self._give_up(self.handoffs.expired(now))
        return self.retries.expired(now)

    @property
    def next_deadline(self) -> float:
        """When the next request expires or is to be prefilled again, in seconds; infinite if none waits."""
        return min(self.retries.next_deadline, self.handoffs.next_deadline)

    def ready_retries(self, now: float) -> Iterator[Outcome]:
        """Remove and yield the returned requests for which a worker has room that has not failed them, and those that
        no worker is left for. A request waits while none of these workers has room, or is in use but one of them is
        ejected and comes back.

        Each must be dispatched or rejected before the next one is asked for.
        """
        for state in self.retries.to_ask(self._fleet.changes):
            request, untried = self._retry_workers.able_to_retry(state)
            if not untried:
                if self._retry_workers.one_comes_back(state):
                    self.retries.set_aside(state)
                else:
                    self.retries.remove(state)
                    served = self._fleet.candidates(state.request)
                    yield state, Refusal.NO_RETRY if served else Refusal.NO_WORKER
            elif with_room := self._with_room(state, request, untried):
                self.retries.remove(state)
                others = [worker for worker in with_room if worker != state.kept_in_vain]
                worker = self._policy.resend(request, others or with_room, now)
                yield state, Choice(request, worker, "tried again")

    def _with_room(self, state: RequestState, request: Request, workers: Iterable[WorkerId]) -> list[WorkerId]:
        may_begin, admits = self._retry_workers.may_begin, self._view.admits
        return [each for each in workers if may_begin(state, each) and admits(each, request, state.resumed_output)]

    def ready_handoffs(self, now: float) -> Iterator[Outcome]:
        """Remove and yield the prefilled requests, as `ready_retries` does, for decode workers."""
        self._give_up(self.handoffs.expired(now))
        for state in self.handoffs:
            rest = rest_of(state.request)
            serving = self._fleet.candidates(rest)
            untried = state.untried(serving)
            if serving and not untried:
                if state.untried(self._fleet.coming_back(rest.shared_route)):
                    continue
                self.handoffs.remove(state)
                yield state, Refusal.NO_RETRY
            elif with_room := [worker for worker in untried if self._fleet[worker].admits(1)]:
                self.handoffs.remove(state)
                yield state, Choice(rest, self._policy.resend(rest, with_room, now), "prefilled")

    def decoder_beside(self, state: RequestState, now: float) -> Choice:
        """Choose the decode worker that is called together with a prefill worker, which is chosen already."""
        part = rest_beside(state.request)
        untried = self._retry_workers.decoders(state)
        with_room = [worker for worker in untried if self._fleet[worker].admits(1)]
        return Choice(part, self._policy.resend(part, with_room or untried, now), "at once")
