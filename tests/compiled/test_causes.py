"""No code reads the cause of an error: mypyc compiles `raise ... from` without it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_file_reads_the_cause_of_an_error() -> None:
    """What the raiser of an error knows is an attribute of the error, which compiled code sets, too."""
    files = [file for package in ("router", "workers", "bench") for file in sorted((ROOT / package).rglob("*.py"))]
    read = [
        f"{file.relative_to(ROOT)}:{node.lineno} reads __cause__: give the error an attribute"
        for file in files
        if "__cause__" in (text := file.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "__cause__"
    ]
    assert not read
