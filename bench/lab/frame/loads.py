"""The workloads at the loads that the conditions fix."""

from bench.lab.frame.conditions import FIG7_SESSIONS, ON_A100, OVERLOAD, PLAIN_SESSIONS, at_rate
from bench.workloads.combined import Combined
from bench.workloads.parts.traffic import Workload
from bench.workloads.registry import WORKLOADS


def loaded(name: str, workers: int, load: float = OVERLOAD) -> Workload:
    """Return a workload whose rate is `load` times what `workers` A100s can serve; its clients' shares stay.

    Raises KeyError if its sessions are unknown.
    """
    if name in PLAIN_SESSIONS:
        return at_rate(WORKLOADS[name], load * workers / ON_A100[PLAIN_SESSIONS[name]])
    heavy, light = (ON_A100[session] for session in FIG7_SESSIONS[name])
    workload = WORKLOADS[name]
    assert isinstance(workload, Combined)
    parts = workload.parts
    own = sum(part.rate for part in parts.values())
    seconds = parts["heavy"].rate * heavy + parts["light"].rate * light
    return workload.at_rate(load * workers * own / seconds)
