"""What operators see of a cluster: who leads, which replicas it serves, and how the store does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What operators see of the cluster."""

    leader: str
    """The replica that leads."""
    epoch: int
    since: float
    """When its present run began to lead, in seconds since 1970."""
    address: str
    fronts: Mapping[str, int]
    """How many fronts of each replica are connected."""
    waiting: Sequence[str]
    """The replicas that would take over, when the store last answered."""
    store: str
    """`ok`, `unreachable`, or `unsaved` if the last save of the state failed."""
    save_age: float | None
    """Seconds since the last save; None before the first."""


class ClusterMetrics(Collector):
    """Shows the report of a cluster; the leader's page is that of all replicas."""

    def __init__(self, report: Callable[[], ClusterReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        leader = GaugeMetricFamily("d2lpm_cluster_leader", "Always 1; its label says who leads.", labels=("replica",))
        leader.add_metric((report.leader,), 1)
        yield leader
        yield GaugeMetricFamily("d2lpm_cluster_epoch", "The epoch of the leader.", value=report.epoch)
        since = "When the leader began to lead, in seconds since 1970."
        yield GaugeMetricFamily("d2lpm_cluster_leader_since_seconds", since, value=report.since)
        waiting = "Replicas that would take over, when the store last answered."
        yield GaugeMetricFamily("d2lpm_cluster_waiting_replicas", waiting, value=len(report.waiting))
        unreachable = "1 while the store of the cluster does not answer, else 0."
        yield GaugeMetricFamily("d2lpm_cluster_store_unreachable", unreachable, value=report.store == "unreachable")
        if report.save_age is not None:
            age = "Age of the state in the store of the cluster."
            yield GaugeMetricFamily("d2lpm_cluster_save_age_seconds", age, value=report.save_age)
        fronts = GaugeMetricFamily("d2lpm_cluster_fronts", "Connected fronts of each replica.", labels=("replica",))
        for replica, count in report.fronts.items():
            fronts.add_metric((replica,), count)
        yield fronts
