"""What was done to each request on its way: the answer to "why did that fail?". Pure."""

from collections import defaultdict
from dataclasses import dataclass

from .faults import Kind


@dataclass(frozen=True, slots=True)
class Harm:
    """A try of a request that a fault met."""

    worker: int
    kind: Kind
    begun: bool
    """Whether a part of the answer was on its way to the router before."""


class Evidence:
    """Who was harmed by what."""

    def __init__(self) -> None:
        self._harms: defaultdict[str, list[Harm]] = defaultdict(list)

    def add(self, request: str, worker: int, kind: Kind, *, begun: bool) -> None:
        """A fault met a try of this request."""
        self._harms[request].append(Harm(worker, kind, begun))

    def of(self, request: str) -> tuple[Harm, ...]:
        """In the order of what happened."""
        return tuple(self._harms.get(request, ()))

    def __len__(self) -> int:
        """Requests that were harmed."""
        return len(self._harms)
