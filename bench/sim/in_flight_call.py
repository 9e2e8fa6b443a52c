"""One call in flight, as the gateway sees it."""

from bench.sim.emulated_worker import Progress
from bench.workloads.parts.traffic import Call, Client
from router.core.model.commands import Dispatch
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Request, Usage, WorkerId


class InFlightCall:
    """The state of a call between its arrival and its end."""

    __slots__ = (
        *("arrived", "call", "charged", "client", "dispatched_at", "ended", "predicted_cached_tokens", "progress"),
        *("request", "started", "why", "worker"),
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
        self.progress = Progress()
        self.charged = 0
        self.ended = False

    def dispatched(self, dispatch: Dispatch, now: float) -> None:
        """Record that the call was sent to a worker."""
        self.dispatched_at = now
        self.worker = dispatch.worker
        self.why = dispatch.why
        self.predicted_cached_tokens = dispatch.cached_tokens

    def usage(self, now: float) -> Usage:
        """Return the usage that the engine has reported to the router so far."""
        return Usage(len(self.call.prompt), self.progress.seen(now), self.progress.cached_tokens)

    @property
    def answer(self) -> tuple[int, ...]:
        """The token ids that the engine has generated."""
        return tuple(self.progress.answer)

    def answers(self) -> tuple[PromptKey, ...]:
        """Return prompt and answer as one key."""
        return (self.call.prompt.followed_by(self.answer).key,)
