"""What an operator changed of the fleet, as another run of the scheduler repeats it."""

from functools import partial

import pytest

from router.config.addresses import WorkerAddress
from router.config.settings import Settings
from router.core.model.request import WorkerId
from router.upstream.directory import WorkerDirectory
from router.upstream.polling.poller import Poller
from router.upstream.worker_registry import OperatorChanges, WorkerDrain, WorkerRegistry, endpoint_of

SOURCE = "a file"
WORKER = WorkerAddress(url="http://one:8000")


class Fleet:
    """A registry whose workers always have a call in flight."""

    def __init__(self) -> None:
        directory = WorkerDirectory()
        self.drain = WorkerDrain(lambda _: None)
        poller = Poller(directory, self.drain.feed, 1.0)
        endpoint = partial(endpoint_of, settings=Settings())
        self.registry = WorkerRegistry(directory, poller, self.drain, lambda _: True, endpoint)
        self.registry.set_source_workers(SOURCE, [WORKER])


@pytest.mark.parametrize("drained", [False, True])
def test_a_worker_that_leaves_counts_as_drained_only_if_the_operator_drained_it(*, drained: bool) -> None:
    """If its source names it again in the next run, it serves as it did before."""
    fleet = Fleet()
    if drained:
        fleet.drain.drain(WorkerId(WORKER.id))
    fleet.registry.set_source_workers(SOURCE, [])
    changes = fleet.registry.operator_changes()
    assert changes == OperatorChanges(drained=(WorkerId(WORKER.id),) if drained else ())
    after = Fleet()
    after.registry.repeat(changes)
    assert bool(after.drain.drained) == drained


@pytest.mark.parametrize("worker", [{"url": "http://two:8000", "rank": 0}, {"url": "http://[::1]:8000"}])
def test_a_worker_that_the_operator_adds_is_there_in_the_next_run(worker: dict[str, object]) -> None:
    """Also one whose own id, with @ or brackets, nobody else could be given."""
    fleet = Fleet()
    added = WorkerAddress.model_validate(worker)
    fleet.registry.add(added)
    after = Fleet()
    after.registry.repeat(fleet.registry.operator_changes())
    assert after.registry.operator_changes() == fleet.registry.operator_changes()
    assert added.id in after.registry.operator_changes().added[0]
