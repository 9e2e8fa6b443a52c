"""Which ranks are used, and which step together, by the settings and by what the engine says."""

from typing import Any

import pytest

from router.core.model.request import WorkerId
from router.upstream.ranks.rank_rules import RankRules

FOUR = frozenset(range(4))


@pytest.mark.parametrize(
    ("ranks", "reported", "used"),
    [
        ("auto", FOUR, FOUR),
        ("auto", {0}, ()),
        ("auto", {5}, ()),
        ("auto", {4, 5}, ()),
        ("auto", None, ()),
        ("off", FOUR, ()),
        (1, FOUR, ()),
        (2, FOUR, {0, 1}),
        (6, FOUR, FOUR),
        (6, None, range(6)),
    ],
)
def test_ranks_are_used_as_the_settings_say(ranks: Any, reported: Any, used: Any) -> None:
    """By default all that the engine reports, if there are several, from 0 on; a number is what is used of them, or
    assumed.
    """
    known = None if reported is None else frozenset(reported)
    assert RankRules(ranks).used(known) == frozenset(used)


def test_ranks_that_the_engine_lacks_are_out_of_range() -> None:
    """Only a number names ranks, and only an engine that reports its own lacks any."""
    assert RankRules(6).out_of_range(FOUR) == {4, 5}
    assert not RankRules("auto").out_of_range(FOUR)
    assert not RankRules(6).out_of_range(None)


@pytest.mark.parametrize(
    ("barrier", "group", "several", "lockstep", "expected"),
    [
        ("auto", None, True, None, "w"),
        ("auto", None, True, True, "w"),
        ("auto", None, True, False, None),
        ("auto", None, False, True, None),
        ("auto", "moe", False, None, "moe"),
        ("auto", "moe", True, False, "moe"),
        ("auto", "none", True, True, None),
        ("off", "moe", True, True, None),
    ],
)
def test_ranks_step_together_unless_something_says_otherwise(
    barrier: Any, group: str | None, several: bool, lockstep: bool | None, expected: str | None
) -> None:
    """The settings count before the engine's word, and a single rank without a group waits for nobody."""
    rules = RankRules("auto", barrier)
    assert rules.barrier_of(WorkerId("w"), group, several=several, lockstep=lockstep) == expected
