"""Names and docstrings: one name for one thing, and no docstring that only points elsewhere."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "router").rglob("*.py"))
POINTER = re.compile(r"(?:As )?[Ss]ee (?:the )?[\w`.:]+(?: and [\w`.:]+)?\.?")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    yield from ((path, ast.parse(path.read_text("utf-8"))) for path in FILES)


def twice(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_for_two_classes() -> None:
    """A name that is found in one place is the name of one thing; private classes belong to their file."""
    places = defaultdict[str, list[str]](list)
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not twice(places)


def test_no_file_of_the_core_has_the_name_of_another() -> None:
    """The name of a file of the core says which file it is."""
    places = defaultdict[str, list[str]](list)
    for path in FILES:
        places[path.stem].append(str(path.relative_to(ROOT)))
    core = {name: found for name, found in twice(places).items() if any("core/" in each for each in found)}
    assert set(core) <= {"__init__"}


def test_no_docstring_only_points_elsewhere() -> None:
    """`See X.` says nothing that an overriding method does not say by its name."""
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}"
        for path, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if POINTER.fullmatch((ast.get_docstring(node) or "").strip())
    ]
    assert not found
