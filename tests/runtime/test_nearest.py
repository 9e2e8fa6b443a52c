"""The word that a mistyped one resembles: the nearest known one, or none."""

import pytest

from router.runtime.nearest import did_you_mean, nearest, refuse_unknown_keys, unknown

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
