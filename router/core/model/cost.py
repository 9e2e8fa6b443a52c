"""Service in tokens, its price, and how a bill changes."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from router.core.model.request import ClientId, RequestId, WorkerId


class Tokens(NamedTuple):
    """Service in tokens: prefill computed, prefill found in the cache, output produced."""

    extend: int = 0
    cached: int = 0
    output: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        """Add member by member."""
        return Tokens(self.extend + other.extend, self.cached + other.cached, self.output + other.output)


NOTHING: Final = Tokens()


@dataclass(frozen=True, slots=True)
class LinearCost:
    """W = w_e · extend + w_q · output (DLPM paper, section 3); `cached` = w_e gives VTC's price of the full input."""

    extend: float = 1.0
    output: float = 2.0
    cached: float = 0.0

    def __call__(self, tokens: Tokens) -> float:
        """Price these tokens."""
        return self.extend * tokens.extend + self.cached * tokens.cached + self.output * tokens.output


class Charge(NamedTuple):
    """How one request's bill changed: what it came to before, and what it comes to now."""

    request: RequestId
    client: ClientId
    worker: WorkerId
    before: Tokens
    after: Tokens

    def at(self, cost: LinearCost) -> float:
        """The change at this price; negative where an estimate was too high."""
        extend, cached, output = self.after
        had_extend, had_cached, had_output = self.before
        return (cost.extend * extend + cost.cached * cached + cost.output * output) - (
            cost.extend * had_extend + cost.cached * had_cached + cost.output * had_output
        )
