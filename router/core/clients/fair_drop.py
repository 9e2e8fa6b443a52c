"""Amounts of a scarce resource by holder, and the holder with the most of it by weight.

When room runs out, the holder with the most gives way, not the newest arrival ("longest queue drop"; B. Suter et al.,
"Buffer Management Schemes for Supporting TCP in Gigabit Routers with Per-flow Queueing", 1999). A flood therefore costs
the flooder, and no holder with less than an equal share by weight is refused because of it.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

K = TypeVar("K", bound=str)


@dataclass(slots=True)
class HolderAmount:
    """The amount and weight of one holder."""

    amount: int = 0
    weight: float = 1.0


class LongestQueueDrop(Generic[K]):
    """Amounts by holder, their total, and the holder with the most by weight.

    Every operation is O(log holders).
    """

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[K, HolderAmount] = {}
        self._heap: list[tuple[float, K]] = []
        """Negative amounts by weight. For each holder that is not in `_grown`, one entry is at least its current
        amount; entries may be stale.
        """
        self._grown: dict[K, None] = {}
        """The holders that got more since the heap was last used: it is used only where room runs out."""

    def __len__(self) -> int:
        """Return the number of holders with a positive amount."""
        return len(self._held)

    def amount_of(self, holder: K) -> int:
        """Return the amount of a holder; 0 if it holds nothing."""
        held = self._held.get(holder)
        return 0 if held is None else held.amount

    def weighted_amount(self, holder: K) -> float:
        """Return a holder's amount divided by its weight; 0 if it holds nothing."""
        held = self._held.get(holder)
        return 0.0 if held is None else held.amount / held.weight

    def add(self, holder: K, amount: int, weight: float = 1.0) -> None:
        """Add to a holder's amount and set its weight, which must be positive."""
        if not amount:
            return
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = HolderAmount()
        held.amount += amount
        held.weight = weight
        self.total += amount
        self._grown[holder] = None

    def remove(self, holder: K, amount: int) -> None:
        """Subtract from a holder's amount."""
        if not amount:
            return
        held = self._held[holder]
        held.amount -= amount
        self.total -= amount
        if not held.amount:
            del self._held[holder]
            self._grown.pop(holder, None)

    def largest_holder(self) -> K | None:
        """Return the holder with the most by weight, the first by name among equals; None if there are no holders."""
        if self._grown:
            self._take_in_grown()
        while self._heap:
            level, holder = self._heap[0]
            actual = -self.weighted_amount(holder)
            if level == actual and holder in self._held:
                return holder
            if holder in self._held:
                heapreplace(self._heap, (actual, holder))
            else:
                heappop(self._heap)
        return None

    def _take_in_grown(self) -> None:
        """Bring the heap up to date with the holders that got more."""
        if len(self._heap) + len(self._grown) > 2 * len(self._held) + 16:
            self._heap = [(-self.weighted_amount(each), each) for each in self._held]
            heapify(self._heap)
        else:
            for holder in self._grown:
                heappush(self._heap, (-self.weighted_amount(holder), holder))
        self._grown.clear()
