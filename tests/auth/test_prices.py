"""What usage costs: which price a model has on a day, and the amount."""

from datetime import date
from decimal import Decimal

import pytest

from router.auth.prices import NO_PRICES, Price, PriceList, day_of
from router.core.model.request import ClientId
from router.core.model.saved import DailyUsage

DAY = 20_000
NEW_YEAR = date(2027, 1, 1)


def price(computed: str, cached: str, output: str, since: date = date.min) -> Price:
    return Price(Decimal(computed), Decimal(cached), Decimal(output), since)


def used(model: str = "llama", day: int = DAY) -> DailyUsage:
    return DailyUsage(day, ClientId("ann"), model, 2, 1000, 400, 70, 300, 9)


def amount(prices: PriceList, row: DailyUsage, bases: dict[str, str] | None = None) -> Decimal | None:
    (priced,) = prices.priced([row], bases or {})
    return priced.amount


def test_an_amount_is_that_of_its_three_parts() -> None:
    """Computed input, cached input and output cost their own prices per million tokens, without any rounding."""
    prices = PriceList("EUR", {"llama": (price("0.2", "0.05", "0.6"),)})
    assert amount(prices, used()) == Decimal("0.000182")  # (600 * 0.2 + 400 * 0.05 + 70 * 0.6) / 1e6
    (row,) = prices.priced([used()], {})
    assert (row.day, row.client, row.model, row.calls) == (date(2024, 10, 4), "ann", "llama", 2)
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (1000, 400, 70)
    assert (row.estimated_input_tokens, row.estimated_output_tokens) == (300, 9)


@pytest.mark.parametrize("prices", [NO_PRICES, PriceList("EUR", {"qwen": (price("1", "1", "1"),)})])
def test_a_model_without_a_price_has_no_amount(prices: PriceList) -> None:
    """Nothing is shown, rather than an amount of 0."""
    assert amount(prices, used()) is None


def test_an_adapter_without_a_price_costs_what_its_base_model_does() -> None:
    """Its own price comes first."""
    base, own = price("1", "1", "1"), price("2", "2", "2")
    bases = {"sql": "llama", "tone": "llama"}
    prices = PriceList("EUR", {"llama": (base,), "tone": (own,)})
    assert amount(prices, used("sql"), bases) == base.amount(used())
    assert amount(prices, used("tone"), bases) == own.amount(used())
    assert amount(prices, used("sql")) is None


def test_a_day_has_the_latest_price_that_held_then() -> None:
    """A price that begins later changes no day before it; before the first one there is none."""
    later, earlier = price("2", "2", "2", NEW_YEAR), price("1", "1", "1", date(2026, 1, 1))
    prices = PriceList("EUR", {"llama": (later, earlier)})
    assert prices.at("llama", date(2027, 1, 1), {}) == later
    assert prices.at("llama", date(2026, 12, 31), {}) == earlier
    assert prices.at("llama", date(2025, 12, 31), {}) is None


def test_days_are_counted_from_1970() -> None:
    """The core counts days since the beginning of 1970."""
    assert (day_of(0), day_of(DAY)) == (date(1970, 1, 1), date(2024, 10, 4))
