"""Placements that look at load alone."""

from collections.abc import Sequence

from router.core.model import Request
from router.core.policy import Candidate, Placed, Placement, Surroundings


class RoundRobin(Placement):
    """Workers take turns, model by model, whatever they hold and however long their queues."""

    def __init__(self, surroundings: Surroundings) -> None:  # noqa: ARG002 - every placement is built alike
        self._turns: dict[str, int] = {}

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """See `Placement`."""
        # One count for all models would give each of two that alternate every second worker only.
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        return Placed(candidates[turn % len(candidates)].worker, "turn")


class LeastRequests(Placement):
    """The worker with the fewest requests waiting or running; ties take turns."""

    def __init__(self, surroundings: Surroundings) -> None:  # noqa: ARG002 - every placement is built alike
        self._turn = 0

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        """See `Placement`."""
        self._turn += 1
        return Placed(lightest(candidates, self._turn).worker, "load")


def lightest(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidate with the least load; `turn` rotates ties, so that equals share."""
    least = min([candidate.load for candidate in candidates])
    tied = [candidate for candidate in candidates if candidate.load == least]
    return tied[turn % len(tied)]
