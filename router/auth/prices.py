"""Prices of models, and what usage costs at them: money, which only this file knows.

Tokens are kept and money is not: amounts are computed when they are asked for, with the prices that hold for the day of
the usage.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Final, NamedTuple

from pydantic import PlainSerializer

from router.core.model.request import ClientId
from router.core.model.saved import DailyUsage

_EPOCH: Final = date(1970, 1, 1).toordinal()


def day_of(number: int) -> date:
    """Return a day by the days since 1970-01-01."""
    return date.fromordinal(_EPOCH + number)


class Price(NamedTuple):
    """Prices per million tokens from a day on."""

    input: Decimal
    """Of input tokens that no cache had."""
    cached_input: Decimal
    output: Decimal
    since: date = date.min
    """The first day (UTC) on which it holds."""

    def amount(self, used: DailyUsage) -> Decimal:
        """Return what usage costs."""
        computed = used.input_tokens - used.cached_tokens
        total = computed * self.input + used.cached_tokens * self.cached_input + used.output_tokens * self.output
        return total.scaleb(-6)  # a price is for a million tokens


@dataclass(frozen=True, slots=True)
class PricedUsage:
    """What one client used of one model on one day (UTC), by its calls that ended then, and what that costs."""

    day: date
    client: ClientId
    """Its name; `other` for clients without names that have lost their own rows."""
    model: str
    """The name that the workers list, not an alias."""
    calls: int
    """Calls that a worker accepted."""
    input_tokens: int
    """All input tokens, cached or not."""
    cached_tokens: int
    """Input tokens that were found in a prefix cache."""
    output_tokens: int
    estimated_input_tokens: int
    """Input tokens of calls whose engine did not say how many they were, or how many of them were cached."""
    estimated_output_tokens: int
    """Output tokens of calls whose engine did not say how many they were."""
    amount: Annotated[Decimal, PlainSerializer(float)] | None
    """What it costs, in the currency of the prices; None without a price."""


class PriceList(NamedTuple):
    """The prices of all models. Immutable: a reload replaces it as a whole."""

    currency: str | None = None
    models: Mapping[str, tuple[Price, ...]] = {}
    """The prices of each model, the latest first."""

    def priced(self, rows: Iterable[DailyUsage], bases: Mapping[str, str]) -> Iterator[PricedUsage]:
        """Yield these rows with what they cost. `bases`: the base model of each adapter."""
        for row in rows:
            day = day_of(row.day)
            price = self.at(row.model, day, bases)
            yield PricedUsage(day, *row[1:], None if price is None else price.amount(row))

    def at(self, model: str, day: date, bases: Mapping[str, str]) -> Price | None:
        """Return the price of a model on a day: its own, or else that of its base model. None if neither has one."""
        for name in (model, bases.get(model, "")):
            for price in self.models.get(name, ()):
                if price.since <= day:
                    return price
        return None


NO_PRICES: Final = PriceList()
