"""Placements that ignore prefixes and choose by turn, load or chance."""

from collections import Counter
from collections.abc import Sequence

from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext


class RoundRobin(Placement):
    """Workers take turns, per model, whatever they hold and however long their queues are."""

    def __init__(self, context: PolicyContext) -> None:  # noqa: ARG002 - the factory's signature
        self._turns: dict[str, int] = {}

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        # With one count for all models, two models that alternate would each get only every second worker.
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        return Placed(candidates[turn % len(candidates)].worker, "turn")


class ClientRoundRobin(Placement):
    """Each client's requests rotate over the workers, per model, so that each worker gets its share of each client.

    "Locality-aware Fair Scheduling in LLM Serving" places requests in this way when it compares with VTC on several
    workers.
    """

    def __init__(self, context: PolicyContext) -> None:  # noqa: ARG002 - the factory's signature
        self._turns: dict[str, dict[ClientId, int]] = {}

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        turns = self._turns.setdefault(request.model, {})
        # Clients start at different workers: otherwise the first would get all clients that send one request.
        turn = turns.get(request.client, len(turns))
        turns[request.client] = turn + 1
        return Placed(candidates[turn % len(candidates)].worker, "turn")

    def forget(self, client: ClientId) -> None:
        for turns in self._turns.values():
            turns.pop(client, None)


class LeastRequests(Placement):
    """The worker with the fewest requests waiting or running; ties rotate."""

    def __init__(self, context: PolicyContext) -> None:  # noqa: ARG002 - the factory's signature
        self._turn = 0

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        self._turn += 1
        return Placed(lightest(candidates, self._turn).worker, "load")


class TwoChoices(Placement):
    """Of two workers drawn at random, the one with fewer requests waiting or running; of equals, the one drawn first.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._random = context.random

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return Placed(min(drawn, key=lambda candidate: candidate.load).worker, "load")


class RandomWorker(Placement):
    """Any worker, each with equal probability."""

    def __init__(self, context: PolicyContext) -> None:
        self._random = context.random

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        return Placed(self._random.choice(candidates).worker, "chance")


class KvPlacement(Placement):
    """The context of each worker's requests, in tokens: what is in flight, and the inputs of what waits for it."""

    def __init__(self, context: PolicyContext) -> None:
        self._view = context.view
        self._waiting: dict[RequestId, tuple[WorkerId, int]] = {}
        self._waiting_tokens: Counter[WorkerId] = Counter()

    def book(self, request: Request, candidate: Candidate) -> None:
        tokens = candidate.cached_tokens + candidate.extend_tokens
        self._waiting[request.id] = candidate.worker, tokens
        self._waiting_tokens[candidate.worker] += tokens

    def unplace(self, request: RequestId) -> None:
        if (booked := self._waiting.pop(request, None)) is not None:  # one that never waited is unknown
            worker, tokens = booked
            self._waiting_tokens[worker] -= tokens
            if not self._waiting_tokens[worker]:
                del self._waiting_tokens[worker]

    def weigh(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with their tokens as their load."""
        tokens, waiting = self._view.context_tokens, self._waiting_tokens
        return [each._replace(load=tokens(each.worker) + waiting[each.worker]) for each in candidates]


class LeastKv(KvPlacement):
    """The worker whose requests, waiting or running, have the fewest tokens of context; ties rotate."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._turn = 0

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        self._turn += 1
        return Placed(lightest(self.weigh(candidates), self._turn).worker, "load")


class TwoChoicesKv(KvPlacement):
    """`TwoChoices` by tokens of context instead of by requests."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._random = context.random

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        drawn = self.weigh(self._random.sample(candidates, min(2, len(candidates))))
        return Placed(min(drawn, key=lambda candidate: candidate.load).worker, "load")


def lightest(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """Return the candidate with the lowest load. `turn` rotates ties, so that equals share the load."""
    least = min([candidate.load for candidate in candidates])
    tied = [candidate for candidate in candidates if candidate.load == least]
    return tied[turn % len(tied)]
