"""Many polite clients with one call open each, in virtual time: all are served, and light ones wait no round."""

from bench.lab.frame.felt_loads import SMALL, WORKERS, crowd
from bench.lab.sweeps.felt import figures
from bench.report.summary import summarise
from bench.sim.scenario import Scenario
from bench.sim.simulation import Simulation
from router.core.policies.dlpm.dlpm import DlpmParameters
from router.core.policies.dlpm.dlpm_home import DlpmHomeParameters

WITHOUT_END = DlpmHomeParameters(round_seconds=0.0, overdue_after=0.0, head_start=0.0)


def felt(clients: int, *parameters: DlpmHomeParameters | DlpmParameters, policy: str = "dlpm_home") -> dict[str, float]:
    workload = crowd(clients).workload
    result = Simulation(Scenario(policy, workload, (SMALL,) * WORKERS, 80.0, 40.0, parameters=parameters)).run()
    measured = figures(result, summarise(result))
    return {name: value for name, value in measured.items() if isinstance(value, float | int)}


def test_a_crowd_is_served_whole() -> None:
    """Of 120 before 32 places nobody is left out, and light clients wait no longer than one and a half fair rounds.

    By longest match alone some are left out, and hardly more calls are served.
    """
    ours, theirs, by_match = felt(120), felt(120, policy="cache_aware"), felt(120, WITHOUT_END)
    assert (ours["unserved"], by_match["unserved"] > 0) == (0, True)
    assert ours["light longest"] <= 1.5 * max(ours["fair round"], theirs["light longest"])
    assert ours["calls/s"] >= 0.97 * by_match["calls/s"]


def test_by_turns_a_queue_at_each_worker_serves_a_crowd_too() -> None:
    """D2LPM leaves out most of 120, and light clients wait as if they were left out; not where the overdue go first."""
    by_turns, by_match = felt(120, DlpmParameters(overdue_after=1.0), policy="d2lpm"), felt(120, policy="d2lpm")
    assert by_match["unserved"] > 60
    assert by_match["light longest"] > 5 * by_match["fair round"]
    assert by_turns["unserved"] == 0
    assert by_turns["light longest"] <= 1.5 * by_turns["fair round"]
    assert by_turns["calls/s"] >= by_match["calls/s"]
