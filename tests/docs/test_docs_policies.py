"""docs/policies.md says what there is: every policy, every other name of one, every parameter with its default."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from router.core.policies.registry import ALIASES, ORDERS, PARAMETERS, PLACEMENTS, POOLED

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
SECTIONS = {part.split("`")[0]: part for part in TEXT.split("\n### `")[1:]}
"""By the name of the policy."""


def rows(text: str) -> Iterator[tuple[str, str]]:
    """The first two cells of each row of the tables whose first cell is code."""
    for line in text.splitlines():
        if found := re.match(r"\| `([^`]+)` \| ([^|]+) \|", line):
            yield found[1], found[2].strip("`")


def shown(default: object) -> str:
    """A default as the document writes it."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:.10g}" if isinstance(default, float) else str(default)


def test_every_policy_has_a_section_and_no_other() -> None:
    """One for each placement, each order and each pooled policy, even where an order has a placement's name."""
    assert sorted(SECTIONS) == sorted({*PLACEMENTS, *ORDERS, *POOLED})


def test_every_other_name_is_told() -> None:
    """What an alias stands for is what the table says."""
    assert list(rows(TEXT.split("\n## ")[0])) == list(ALIASES.items())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_parameter_stands_there_with_its_default(name: str) -> None:
    """Under its flag, in the section of its policy, in the order of the class; and none that there is no more."""
    told = [row for row in rows(SECTIONS[name]) if row[0].startswith("--")]
    kind = PARAMETERS.get(name)
    group = "--" + name.replace("_", "-")
    held = [] if kind is None else [(f"{group}.{f.name.replace('_', '-')}", shown(f.default)) for f in fields(kind)]
    assert told == held


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_section_answers_the_same_questions(name: str) -> None:
    """What it asks, charges and keeps, whether it has parameters, what it promises, and when not to use it."""
    answered = re.findall(r"^- \*\*([^*]+)\*\*: ", SECTIONS[name], re.MULTILINE)
    assert answered == ["Question", "Charges", "State", "Parameters", "Guarantee", "Not for"]
    assert ("- **Parameters**: none.\n" in SECTIONS[name]) == (name not in PARAMETERS)
