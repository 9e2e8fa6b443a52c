"""What a streamed chat costs through this router and through others."""

import os
import re
import subprocess
import sys

import pytest

from bench.lab.micro.canned_peers import Driven
from bench.lab.neighbour.router_cost import LOADS, OWN, cpu_seconds, table

COMMAND = (sys.executable, "-m", "bench", "router-cost", "--rounds", "1", "--seconds", "1.5")
"""A paced chat takes 0.7 s on an idle machine, and some must end in that time."""
BURNING = """
import subprocess, sys, time
while time.process_time() < 0.2:
    pass
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("burnt", flush=True)
sys.stdin.read()
"""


def test_ratios_are_medians_of_the_rounds_in_which_both_ran() -> None:
    """Of three rounds, in which the other router costs a half, a third and a sixth, the ratio is 3."""
    own = [Driven(calls=100, cpu_seconds=0.6, median_ms=1.0)] * 3
    other = [Driven(calls=100, cpu_seconds=used, median_ms=2.0) for used in (0.3, 0.2, 0.1)]
    lines = table([(LOADS[0], {OWN.name: own, "other": other})], seconds=2.0)
    assert lines[1].split() == ["burst", "d2lpm", "50", "6,000", "375.0", "1.00", "1.0"]
    assert lines[2].split() == ["burst", "other", "50", "2,000", "125.0", "3.00", "2.0"]


def test_the_cpu_time_of_a_router_is_that_of_all_its_processes() -> None:
    """A process whose child has used as much counts twice."""
    command = [sys.executable, "-c", BURNING, BURNING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"burnt\n"
        used = cpu_seconds(parent.pid)
        parent.stdin.close()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert used >= 0.4 - 2 * tick


def test_the_command_measures_this_router_beside_others() -> None:
    """Each router has a row for each load, and its rate and its cost are positive."""
    other = f"other={sys.executable} -m router serve --port {{port}} --log-level error --worker={{worker}}"
    ended = subprocess.run([*COMMAND, "--router", other], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    columns = r"^ *(burst|paced) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$"
    rows = re.findall(columns, ended.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [(load, name) for load in ("burst", "paced") for name in ("d2lpm", "other")]
    assert all(float(value.replace(",", "")) > 0 for row in rows for value in row[2:])


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("other=/nowhere/router {port}", "other does not start: No such file or directory: /nowhere/router"),
        ("other=router", "the command of other must have {port}"),
    ],
)
def test_a_router_that_cannot_be_compared_is_an_error_of_one_line(router: str, expected: str) -> None:
    """The error names it and says why."""
    ended = subprocess.run([*COMMAND, "--router", router], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
