"""Tests what is said of an engine environment that does not work."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .environment import VLLM, CannotMakeError, check_works

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "ended by SIGTERM", id="by a signal"),
        pytest.param("raise ImportError('no such library')", "ImportError: no such library", id="by an error"),
    ],
)
def test_an_engine_that_does_not_load_is_reported_with_its_reason(probe: str, reason: str, tmp_path: Path) -> None:
    """A process that a signal ends leaves no message: the signal is named, such as SIGILL on a CPU without AVX-512."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(CannotMakeError, match=f"the installed vLLM does not load: {reason}"):
        check_works(replace(VLLM, folder=tmp_path, probe=probe))
