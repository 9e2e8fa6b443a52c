"""docs/policies.md describes every policy, every alias, and every parameter with its default."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from router.core.policies.registry import ALIASES, ORDERS, PARAMETERS, PLACEMENTS, POOLED

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
SECTIONS = {part.split("`")[0]: part for part in TEXT.split("\n### `")[1:]}
"""The document's sections by policy name."""


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield the first two cells of each table row whose first cell is code."""
    for line in text.splitlines():
        if found := re.match(r"\| `([^`]+)` \| ([^|]+) \|", line):
            yield found[1], found[2].strip("`")


def shown(default: object) -> str:
    """Return a default as the document writes it."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:.10g}" if isinstance(default, float) else str(default)


def test_every_policy_has_a_section_and_no_other() -> None:
    """Each placement, order and pooled policy has its own section, even where an order has a placement's name."""
    assert sorted(SECTIONS) == sorted({*PLACEMENTS, *ORDERS, *POOLED})


def test_every_alias_is_in_the_table() -> None:
    """The table has each alias with the policy that it stands for."""
    assert list(rows(TEXT.split("\n## ")[0])) == list(ALIASES.items())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_parameter_is_documented_with_its_default(name: str) -> None:
    """Each policy's section has its parameters by flag, in the order of the class, and no parameter that does not
    exist.
    """
    documented = [row for row in rows(SECTIONS[name]) if row[0].startswith("--")]
    kind = PARAMETERS.get(name)
    group = "--" + name.replace("_", "-")
    expected = [] if kind is None else [(f"{group}.{f.name.replace('_', '-')}", shown(f.default)) for f in fields(kind)]
    assert documented == expected


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_section_answers_the_same_questions(name: str) -> None:
    """A section names the policy's question, charges, state, parameters and guarantee, and when not to use it."""
    answered = re.findall(r"^- \*\*([^*]+)\*\*: ", SECTIONS[name], re.MULTILINE)
    assert answered == ["Question", "Charges", "State", "Parameters", "Guarantee", "Not for"]
    assert ("- **Parameters**: none.\n" in SECTIONS[name]) == (name not in PARAMETERS)
