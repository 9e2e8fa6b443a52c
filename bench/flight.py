"""One call on its way, as the gateway sees it."""

from bench.traffic import Call, Client
from router.core.model import Dispatch, Request, Usage, WorkerId
from router.core.prompt_key import PromptKey


class Flight:
    """Between a call's arrival and its end."""

    __slots__ = (
        *("answer", "arrived", "cached_tokens", "call", "charged", "client", "dispatched_at", "ended"),
        *("predicted_cached_tokens", "request", "started", "why", "worker"),
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
        self.cached_tokens: int | None = None
        self.answer: list[int] = []
        self.charged = 0
        self.ended = False

    def dispatched(self, dispatch: Dispatch, now: float) -> None:
        """It is on its way to a worker."""
        self.dispatched_at = now
        self.worker = dispatch.worker
        self.why = dispatch.why
        self.predicted_cached_tokens = dispatch.cached_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens that the router has seen."""
        return len(self.answer)

    def usage(self) -> Usage:
        """What the engine says of it, so far."""
        return Usage(len(self.call.prompt), self.output_tokens, self.cached_tokens)

    def answers(self) -> tuple[PromptKey, ...]:
        """Prompt and answer as one key."""
        return (self.call.prompt.followed_by(tuple(self.answer)).key,)
