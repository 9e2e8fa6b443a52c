"""The documents: their links lead somewhere, and every error code is listed."""

import re
from pathlib import Path

import pytest

from router.core.model.commands import Refusal

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
SOURCES = [path.read_text("utf-8") for path in sorted((ROOT / "router").rglob("*.py"))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?s)```.*?```", "", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(name: str) -> str:
    return OPERATIONS.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_every_link_leads_somewhere(document: Path) -> None:
    """The file of each link exists, and has the heading that the link names."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", document.read_text("utf-8").replace("\n  ", " "))
    for path, anchor in links:
        target = document.parent / path if path else document
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{path}#{anchor}"


def test_every_section_of_operations_is_in_its_index() -> None:
    """The index links to every section, in the order of the page."""
    index = OPERATIONS.split("\n## ")[0]
    linked = re.findall(r"(?m)^- \*\*\[[^\]]+\]\(#([^)]+)\)", index)
    headings = re.findall(r"(?m)^## (.+)$", OPERATIONS)
    assert [{name} for name in linked] == [anchors(f"## {heading}\n") for heading in headings]


def test_every_error_code_is_listed() -> None:
    """The table lists every reason and every code of the sources, and no other."""
    codes = {code for text in SOURCES for code in re.findall(r'\bcode="([a-z_]+)"', text)}
    reasons = {reason for text in SOURCES for reason in re.findall(r'"(rejected-[a-z-]+)"', text)} | set(Refusal)
    listed = set(re.findall(r"`([a-z]+[_-][a-z_-]+)`", section("Every error code")))
    assert listed == codes | reasons
