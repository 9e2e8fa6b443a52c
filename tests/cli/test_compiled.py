"""Compiled code is recognised by its file."""

import pytest

from router.cli.compiled import is_compiled


@pytest.mark.parametrize(("module", "compiled"), [("httptools.parser.parser", True), ("httptools.parser", False)])
def test_a_shared_library_is_compiled_code(module: str, compiled: bool) -> None:
    """A module that is a shared library counts as compiled, one that is a source file does not."""
    assert is_compiled(module) == compiled
