"""What is said of a mistake: the known word that a mistyped one resembles, and what a value must be."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat, SecretStr, TypeAdapter, ValidationError

from router.runtime.mistakes import did_you_mean, nearest, place_in, refuse_unknown_keys, unknown, what_is_wrong

KNOWN = ("dlpm_home", "D2LPM_PORT", "felt")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dlmp_home", "dlpm_home"),
        ("DLPM-HOME", "dlpm_home"),
        ("d2lpm_prot", "D2LPM_PORT"),
        ("figure", None),
        ("", None),
    ],
)
def test_the_nearest_word_is_found_in_any_case(word: str, meant: str | None) -> None:
    """The known word is returned in its own spelling; a word that resembles none has no nearest one."""
    assert nearest(word, KNOWN) == meant


def test_without_a_near_word_nothing_is_suggested() -> None:
    """Nothing is suggested where no word is near, since a wrong suggestion is worse than none."""
    assert did_you_mean("xyz", KNOWN) == ""
    assert did_you_mean("flet", KNOWN) == "; did you mean felt?"


def test_an_unknown_name_is_reported_with_all_known_ones() -> None:
    """The nearest comes first, then all; an empty table says so."""
    assert unknown("figure", "flet", KNOWN) == (
        "unknown figure 'flet'; did you mean felt? (known: dlpm_home, D2LPM_PORT, felt)"
    )
    assert unknown("figure", "flet", ()) == "unknown figure 'flet' (known: none)"


def test_only_an_unknown_key_is_refused() -> None:
    """Known keys pass, and so does what is no mapping: another check says what is wrong with it."""
    for given in ({"felt": 1}, {}, "flet", None, ["flet"]):
        refuse_unknown_keys(given, KNOWN)
    with pytest.raises(ValueError, match=r"^unknown key flet; did you mean felt\?$"):
        refuse_unknown_keys({"dlpm_home": 1, "flet": 2}, KNOWN)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "x", "must be a whole number"),
        (int, "1.5", "must be a whole number"),
        (int, "16MiB", "must be a whole number, without a unit"),
        (float, "1.5 s", "must be a number, without a unit"),
        (float, "x", "must be a number"),
        (bool, "perhaps", "must be yes or no"),
        (str, ["a"], "must be one value, not a list or a mapping"),
        (Path, ["a"], "must be one value, not a list or a mapping"),
        (PositiveFloat, "0", "must be greater than 0"),
        (Annotated[int, Field(ge=1, le=3)], "0", "must be at least 1"),
        (Annotated[int, Field(ge=1, le=3)], "4", "must be at most 3"),
        (tuple[int, ...], "1", "must be a list: [A, B], or a line for each entry that begins with a dash"),
        (dict[str, int], "1", "must be a mapping of names to values"),
        (Literal["learned", "fixed", "off"], "lerned", "must be learned, fixed or off; did you mean learned?"),
        (Annotated[tuple[int, ...], Field(min_length=1)], [], "must have at least 1 entry"),
        (Annotated[SecretStr, Field(min_length=16)], "short", "must have at least 16 characters, not 5"),
    ],
)
def test_what_a_value_must_be_is_said_in_plain_words(kind: Any, value: object, said: str) -> None:
    """The message names no type of Python and does not repeat the value."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(value)
    assert what_is_wrong(caught.value.errors()[0]) == said


def test_a_list_is_counted_from_one() -> None:
    """The place of a value in a list is its number among the entries, from 1."""
    assert place_in(("worker", 1, "url")) == ["worker", "entry 2", "url"]
