"""One call in flight, as the gateway sees it."""

from collections.abc import Sequence
from typing import Final

from bench.sim.emulated_worker import Progress
from bench.workloads.parts.traffic import Call, Client
from router.core.model.commands import Dispatch
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Request, RequestId, Usage, WorkerId

PART: Final = "#"
"""Before the number of a further answer, in its id at the engine."""


class InFlightCall:
    """The state of a call between its arrival and its end."""

    __slots__ = (
        *("arrived", "call", "charged", "client", "dispatched_at", "ended", "parts", "predicted_cached_tokens"),
        *("request", "started", "unended", "why", "worker"),
    )

    def __init__(self, client: Client, call: Call, request: Request, now: float) -> None:
        self.client = client
        self.call = call
        self.request = request
        self.arrived = now
        self.dispatched_at: float | None = None
        self.started: float | None = None
        self.worker: WorkerId | None = None
        self.why: str | None = None
        self.predicted_cached_tokens: int | None = None
        self.parts = {name: Progress() for name in part_names(request.id, call.answers)}
        """The engine's requests, one for each answer, by their ids there."""
        self.unended = call.answers
        """How many of them have not ended."""
        self.charged = 0
        self.ended = False

    def dispatched(self, dispatch: Dispatch, now: float) -> None:
        """Record that the call was sent to a worker."""
        self.dispatched_at = now
        self.worker = dispatch.worker
        self.why = dispatch.why
        self.predicted_cached_tokens = dispatch.cached_tokens

    def output_seen(self, now: float) -> int:
        """Return how many output tokens have reached the router."""
        return sum([part.seen(now) for part in self.parts.values()])

    @property
    def cached_tokens(self) -> int | None:
        """The tokens of the prompt that the engine found in its cache; None before the first token."""
        return self._first.cached_tokens

    def usage(self, now: float) -> Usage:
        """Return the usage that the engine has reported to the router so far."""
        return Usage(len(self.call.prompt), self.output_seen(now), self.cached_tokens)

    @property
    def answer(self) -> tuple[int, ...]:
        """The token ids that the engine has generated for the first answer."""
        return tuple(self._first.answer)

    @property
    def _first(self) -> Progress:
        return next(iter(self.parts.values()))

    def answers(self) -> tuple[PromptKey, ...]:
        """Return prompt and answer as one key."""
        return (self.call.prompt.followed_by(self.answer).key,)


def part_names(request: RequestId, answers: int) -> Sequence[str]:
    """Return the ids at the engine of a request's answers, the first of which is that of the request."""
    return [request, *(f"{request}{PART}{number}" for number in range(1, answers))]


def request_of(part: str) -> RequestId:
    """Return the request that the engine's request belongs to."""
    return RequestId(part.partition(PART)[0])
