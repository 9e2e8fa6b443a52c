"""How many processes serve."""

import os

import pytest

from router.config.settings import Settings
from router.process.supervision.supervisor import process_count


def test_auto_is_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the process may use; where the system does not say which these are, of all."""
    assert process_count(Settings(processes="auto")) == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process_count(Settings(processes="auto")) == os.cpu_count()
    assert process_count(Settings(processes=3)) == 3
