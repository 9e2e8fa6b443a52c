"""D²LPM's counters q_{i,w} start and grow as Algorithm 2 and the workers' speed demand."""

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.deficit.deficits import WorkerDeficits

ADA = ClientId("ada")
W1, W2, W3 = (WorkerId(name) for name in ("w1", "w2", "w3"))


def request(weight: float = 1.0) -> Request:
    return Request(RequestId("r"), ADA, "llama", (), weight=weight)


def test_some_deficit_of_a_client_is_always_positive() -> None:
    """When all of a client's deficits are used up, quanta are added until one is positive (Algorithm 2, the loop of
    SELECTWORKER).
    """
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    table = worker_deficits.refilled_table(request(), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [100, 100]
    worker_deficits.charge(ADA, W1, 150)
    worker_deficits.charge(ADA, W2, 420)
    table = worker_deficits.refilled_table(request(), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [50, -220]


def test_a_new_worker_starts_with_the_highest_deficit() -> None:
    """A new worker gets a client's highest deficit, or it would get no requests until every other
    deficit is used up.
    """
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    worker_deficits.refilled_table(request(), [W1, W2])
    worker_deficits.charge(ADA, W1, 30)
    worker_deficits.charge(ADA, W2, 60)
    assert worker_deficits.refilled_table(request(), [W1, W2, W3]).deficit(W3) == 70


def test_a_quantum_scales_with_weight_and_speed() -> None:
    """A worker half as fast holds a client for the same time, and so for half the cost."""
    speeds = {W1: 1.5, W2: 0.5}
    table = WorkerDeficits(100.0, speeds.__getitem__, Shares()).refilled_table(request(weight=2.0), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [300, 100]


def test_a_worker_that_a_client_was_never_placed_among_has_no_counter() -> None:
    """A charge creates no counter for a worker that the client was never placed among."""
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    worker_deficits.charge(ADA, W1, 5)
    assert worker_deficits.deficit(ADA, W1) is None
    assert worker_deficits.deficit(ClientId("bob"), W1) is None
