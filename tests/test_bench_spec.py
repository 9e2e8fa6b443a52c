"""Parameters behind a colon on the command line."""

from dataclasses import dataclass
from typing import Literal

import pytest

from bench.spec import parse_spec


@dataclass(frozen=True, slots=True)
class Parameters:
    """One of each kind."""

    count: int = 1
    rate: float = 0.5
    limit: int | None = 3
    weights: tuple[float, ...] = ()
    kind: Literal["poisson", "uniform"] = "poisson"
    stream: bool = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must not be negative")


TABLE = {"one": Parameters(), "two": Parameters(count=2)}


def test_a_name_alone_is_the_entry_of_the_table() -> None:
    """Without a colon nothing is changed."""
    assert parse_spec("two", TABLE) == TABLE["two"]


def test_values_are_read_by_their_type() -> None:
    """Each kind of parameter is read as what it is, and those that are not named stay."""
    read = parse_spec("two:rate=3,limit=none,weights=1/2.5,kind=uniform,stream=off", TABLE)
    assert read == Parameters(2, 3.0, None, (1.0, 2.5), "uniform", False)
    assert parse_spec("one:limit=7", TABLE).limit == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("three", "unknown name 'three', known: one, two"),
        ("one:size=3", "unknown parameter 'size', known: count, rate"),
        ("one:count", "'count' is not parameter=value"),
        ("one:count=x", "'x' is no value for count"),
        ("one:count=1.5", "'1.5' is no value for count"),
        ("one:kind=burst", "'burst' is no value for kind"),
        ("one:stream=maybe", "'maybe' is no value for stream"),
        ("one:count=-1", "count must not be negative"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    """What is wrong is said, with what would be right where that is a short list."""
    with pytest.raises(ValueError, match=complaint):
        parse_spec(text, TABLE)
