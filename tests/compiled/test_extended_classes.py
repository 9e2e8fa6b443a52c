"""No interpreted file of the package extends a class of a compiled one, which fails only in the compiled build."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hatch_build import COMPILED, PLAIN, compiled_files

ROOT = Path(__file__).parents[2]
LAB = ROOT / "bench" / "lab"
"""Experiments, which no wheel contains."""


def extended(file: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the name of each imported class that a class of this file extends."""
    text = file.read_text("utf-8")
    if not re.search(r"(?m)^ *class \w+[(\[]", text):
        return
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    origin = {
        name.asname or name.name: (ROOT / f"{each.module}".replace(".", "/")).with_suffix(".py")
        for each in imports
        for name in each.names
    }
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name) and plain.id in origin:
                yield origin[plain.id], plain.id


def test_no_interpreted_class_extends_a_compiled_one() -> None:
    """Python refuses to make a class of an interpreted file that extends one of a compiled file."""
    compiled = set(compiled_files(ROOT))
    files = {file for package in ("router", "workers", "bench") for file in (ROOT / package).rglob("*.py")}
    interpreted = [file for file in sorted(files - compiled) if LAB not in file.parents]
    wrong = [
        f"{file.relative_to(ROOT)} extends {name} of {base.relative_to(ROOT)}: add the latter to hatch_build.PLAIN"
        for file in interpreted
        for base, name in extended(file)
        if base in compiled
    ]
    assert not wrong


def test_each_pattern_of_the_build_names_a_file() -> None:
    """A file that has moved does not stay listed."""
    assert [pattern for pattern in (*COMPILED, *PLAIN) if not any(ROOT.glob(pattern))] == []
