"""One call on its way, as the gateway sees it."""

from bench.sim.emulated_worker import Progress
from bench.workloads.parts.traffic import Call, Client
from router.core.model.commands import Dispatch
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Request, Usage, WorkerId


class Flight:
    """Between a call's arrival and its end."""

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
        """It is on its way to a worker."""
        self.dispatched_at = now
        self.worker = dispatch.worker
        self.why = dispatch.why
        self.predicted_cached_tokens = dispatch.cached_tokens

    def usage(self, now: float) -> Usage:
        """What the router has heard from the engine about it so far."""
        return Usage(len(self.call.prompt), self.progress.seen(now), self.progress.cached_tokens)

    @property
    def answer(self) -> tuple[int, ...]:
        """Token ids that the engine has put out."""
        return tuple(self.progress.answer)

    def answers(self) -> tuple[PromptKey, ...]:
        """Prompt and answer as one key."""
        return (self.call.prompt.followed_by(self.answer).key,)
