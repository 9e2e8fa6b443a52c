"""Compiled code is recognised by its file."""

from pathlib import Path

import pytest
from httptools import parser

from router.cli.compiled import is_compiled

PARSER = Path(parser.__file__).parent


@pytest.mark.parametrize(("file", "compiled"), [("parser.py", True), ("errors.py", False), ("missing.py", False)])
def test_a_shared_library_is_compiled_code(file: str, compiled: bool) -> None:
    """A file counts as compiled if Python would load a shared library of its name from its folder."""
    assert is_compiled(str(PARSER / file)) == compiled
