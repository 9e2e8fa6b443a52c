"""A crowd before small workers: its figures in virtual time, one short run over HTTP, and its table."""

import pytest

from bench.__main__ import main
from bench.lab.sweeps.crowd_live import Manner, live, table, virtual


def test_a_row_has_what_clients_saw() -> None:
    """The default serves all of 40 clients within 20 s, and the d2lpm that starves some shows it."""
    manner = Manner(clients=40, seconds=20.0)
    ours, starving = virtual("dlpm_home", manner), virtual("d2lpm", manner)
    assert (ours.unserved, starving.unserved > 0) == (0, True)
    assert 0 < ours.light_longest < manner.seconds
    assert ours.calls > 2 * 40
    assert table([ours])[1].split()[:2] == ["dlpm_home", "0"]


def test_longer_prefixes_leave_fewer_calls() -> None:
    """The length of the clients' prefixes is a parameter: they are computed once, so longer ones take places."""
    short, long = (virtual("dlpm_home", Manner(clients=20, seconds=10.0, prefix=tokens)) for tokens in (200, 6000))
    assert short.calls > long.calls


def test_a_crowd_over_http_is_answered() -> None:
    """The calls that clients saw answered are counted."""
    row = live("dlpm_home", Manner(clients=4, seconds=20.0, speed=4.0))
    assert row.calls > 0
    assert row.late is not None


def test_an_unknown_policy_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported in one line."""
    with pytest.raises(SystemExit):
        main(["crowd", "--virtual", "--policy", "nothing"])
    assert capsys.readouterr().err.startswith("crowd: error: ")
