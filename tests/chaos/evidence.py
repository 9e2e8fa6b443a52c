"""Records the faults that each request met, to explain why it failed. Pure."""

from collections import defaultdict
from dataclasses import dataclass

from .faults import Kind


@dataclass(frozen=True, slots=True)
class Harm:
    """One attempt of a request that met a fault."""

    worker: int
    kind: Kind
    begun: bool
    """True if a part of the answer had already reached the router."""


class Evidence:
    """The faults that each request met."""

    def __init__(self) -> None:
        self._harms: defaultdict[str, list[Harm]] = defaultdict(list)

    def add(self, request: str, worker: int, kind: Kind, *, begun: bool) -> None:
        """Record that an attempt of this request met a fault."""
        self._harms[request].append(Harm(worker, kind, begun))

    def of(self, request: str) -> tuple[Harm, ...]:
        """Return the faults of a request in the order in which they happened."""
        return tuple(self._harms.get(request, ()))

    def __len__(self) -> int:
        """Return the number of requests that met a fault."""
        return len(self._harms)
