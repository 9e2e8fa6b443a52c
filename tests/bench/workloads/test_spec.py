"""Workload parameters behind a colon on the command line."""

from dataclasses import dataclass
from typing import Literal

import pytest

from bench.workloads.parts.spec import parse_spec


@dataclass(frozen=True, slots=True)
class Parameters:
    """One parameter of each type."""

    count: int = 1
    rate: float = 0.5
    limit: int | None = 3
    weights: tuple[float, ...] = ()
    kind: Literal["poisson", "uniform"] = "poisson"
    stream: bool = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must not be negative")


@dataclass(frozen=True, slots=True)
class Whole:
    """A workload of two parts."""

    part: Parameters
    other: Parameters
    level: float = 0.0


TABLE = {"one": Parameters(), "two": Parameters(count=2)}


def test_a_name_alone_is_the_entry_of_the_table() -> None:
    """A name without a colon gives the unchanged entry."""
    assert parse_spec("two", TABLE) == TABLE["two"]


def test_values_are_read_by_their_type() -> None:
    """Each value is read by its parameter's type, and other parameters keep their values."""
    read = parse_spec("two:rate=3,limit=none,weights=1/2.5,kind=uniform,stream=off", TABLE)
    assert read == Parameters(2, 3.0, None, (1.0, 2.5), "uniform", False)
    assert parse_spec("one:limit=7", TABLE).limit == 7


def test_a_dot_leads_to_the_parameters_of_a_part() -> None:
    """A part keeps the parameters that are not named, and its own class reads the values."""
    whole = {"whole": Whole(Parameters(count=5), Parameters())}
    read = parse_spec("whole:part.rate=3,part.limit=none,level=2", whole)
    assert read == Whole(Parameters(5, 3.0, None), Parameters(), 2.0)
    for text in ("whole:part.size=3", "whole:level.size=3", "whole:none.size=3"):
        with pytest.raises(ValueError, match="unknown parameter"):
            parse_spec(text, whole)


def test_the_fields_of_a_part_may_be_given_in_their_order() -> None:
    """Values joined by slashes set a part's first fields, and more values than fields are an error."""
    whole = {"whole": Whole(Parameters(count=5), Parameters())}
    assert parse_spec("whole:part=3/0.25", whole).part == Parameters(3, 0.25)
    assert parse_spec("whole:part=3/0.25,part.stream=off", whole).part == Parameters(3, 0.25, stream=False)
    for text in ("whole:part=x", "whole:part=1/2/3/4/poisson/on/9"):
        with pytest.raises(ValueError, match="is no value for part"):
            parse_spec(text, whole)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("three", r"unknown name 'three' \(known: one, two\)"),
        ("one:size=3", r"unknown parameter 'size' \(known: count, rate"),
        ("one:count", "'count' is not parameter=value"),
        ("one:count=x", "'x' is no value for count"),
        ("one:count=1.5", "'1.5' is no value for count"),
        ("one:kind=burst", "'burst' is no value for kind"),
        ("one:stream=maybe", "'maybe' is no value for stream"),
        ("one:count=-1", "count must not be negative"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    """The message names the mistake, and lists the valid names if they are few."""
    with pytest.raises(ValueError, match=complaint):
        parse_spec(text, TABLE)
