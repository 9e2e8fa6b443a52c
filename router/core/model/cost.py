"""Service in tokens, its cost, and changes to a bill."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from router.core.model.request import ClientId, RequestId, WorkerId


class Tokens(NamedTuple):
    """Service in tokens: prefill computed, prefill found in the cache, and output produced."""

    extend: int = 0
    cached: int = 0
    output: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        """Return the sum, field by field."""
        return Tokens(self.extend + other.extend, self.cached + other.cached, self.output + other.output)


NOTHING: Final = Tokens()


@dataclass(frozen=True, slots=True)
class LinearCost:
    """W = w_e · extend + w_q · output (DLPM paper, section 3). `cached` = w_e gives VTC's cost of the full input."""

    extend: float = 1.0
    output: float = 2.0
    cached: float = 0.0

    def __call__(self, tokens: Tokens) -> float:
        """Return the cost of these tokens."""
        return self.extend * tokens.extend + self.cached * tokens.cached + self.output * tokens.output

    def difference(self, before: Tokens, after: Tokens) -> float:
        """Return by how much the cost rises from `before` to `after`."""
        extend, cached, output = after
        had_extend, had_cached, had_output = before
        return (self.extend * extend + self.cached * cached + self.output * output) - (
            self.extend * had_extend + self.cached * had_cached + self.output * had_output
        )


class Charge(NamedTuple):
    """A change to one request's bill: the tokens billed before and after it."""

    request: RequestId
    client: ClientId
    worker: WorkerId
    before: Tokens
    after: Tokens
    cost: float
    """The change in cost units, at the cost that counts as service; negative if an estimate was too high."""
