"""SGLang's `cache_aware` rule: the best match while the fleet is balanced, and the shortest queue while it is not.

As in SGLang's router since version 0.2 (`cache_aware.rs`, with the defaults of `router_args.py`). One difference: the
match is the prefix map's, in tokens and with evictions, not that of a tree of characters that keeps everything that was
sent. So a tree's size here is the number of tokens that a worker was sent and did not hold.
"""

from collections.abc import Sequence
from typing import ClassVar

from router.core.model.request import Request, WorkerId
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext
from router.core.policies.simple.balancers import lightest
from router.core.policies.simple.simple_parameters import CacheAwareParameters


class CacheAware(Placement):
    """Chooses by match, tree size or load, depending on thresholds."""

    locality: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self._parameters = context.parameters.of(CacheAwareParameters)
        self._trees: dict[WorkerId, int] = {}
        self._turn = 0

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:  # noqa: ARG002
        self._turn += 1
        chosen, why = self._choose(candidates)
        grown = self._trees.get(chosen.worker, 0) + chosen.extend_tokens
        self._trees[chosen.worker] = min(grown, self._parameters.tree_tokens)
        return Placed(chosen.worker, why)

    def _choose(self, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        if self._unbalanced([candidate.load for candidate in candidates]):
            return lightest(candidates, self._turn), "load"
        longest = max([candidate.cached_tokens for candidate in candidates])
        size = candidates[0].cached_tokens + candidates[0].extend_tokens
        if longest > self._parameters.cache_threshold * size:
            return lightest([c for c in candidates if c.cached_tokens == longest], self._turn), "prefix"
        least = min([self._trees.get(candidate.worker, 0) for candidate in candidates])
        smallest = [candidate for candidate in candidates if self._trees.get(candidate.worker, 0) == least]
        return smallest[self._turn % len(smallest)], "smallest tree"

    def _unbalanced(self, loads: Sequence[int]) -> bool:
        most, least = max(loads), min(loads)
        parameters = self._parameters
        return most - least > parameters.balance_abs_threshold and most > parameters.balance_rel_threshold * least

    def worker_left(self, worker: WorkerId) -> None:
        self._trees.pop(worker, None)
