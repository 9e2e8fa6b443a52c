"""Consistent hashing of prefixes: requests with the same beginning go to the same worker, without any state.

Uses highest random weight (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
Transactions on Networking 1998): each worker has a weight for each key, and the highest wins. So a worker that joins
takes its share of the keys and moves no other, and one that leaves gives away only its own. Optionally with bounded
loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), as in the consistent hashing of HAProxy and Envoy, where the load
is unbounded unless a factor is set.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil, inf
from typing import ClassVar

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext
from router.core.policies.simple.simple_parameters import ConsistentHashParameters


class ConsistentHash(Placement):
    """The worker whose hash with the head of the first prompt is highest; without a full chunk, with the client's
    name.
    """

    locality: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self._parameters = context.parameters.of(ConsistentHashParameters)

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """If a prompt is shorter than the head, all its chunks count."""
        hashes = request.prompts[0].hashes if request.prompts else b""
        head = hashes[: self._parameters.prefix_chunks * HASH_BYTES]
        key, why = (head[-HASH_BYTES:], "prefix") if head else (request.client.encode(), "client")
        limit = self._limit(candidates)
        home = max(candidates, key=lambda candidate: _weight(key, candidate))
        if home.load < limit:
            return Placed(home.worker, why)
        below = [candidate for candidate in candidates if candidate.load < limit]
        return Placed(max(below, key=lambda candidate: _weight(key, candidate)).worker, "load")

    def _limit(self, candidates: Sequence[Candidate]) -> float:
        """Return the most requests that a worker may have, including the one to be placed. Some worker always has
        fewer.
        """
        if not self._parameters.load_factor:
            return inf
        total = sum([candidate.load for candidate in candidates])
        return ceil(self._parameters.load_factor * (total + 1) / len(candidates))


def _weight(key: bytes, candidate: Candidate) -> bytes:
    # Python's built-in string hash differs from process to process.
    return blake2b(key + candidate.worker.encode(), digest_size=8).digest()
