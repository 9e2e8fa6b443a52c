"""First come, first served: in one worker's queue and from one pool."""

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Refusal
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import MODEL, ONE_AT_A_TIME, Scene


def test_a_queue_is_served_in_order_of_arrival() -> None:
    """Whoever sends a request and however much of it is cached; cancelled requests are skipped."""
    talk = Scene("rr+fcfs", settings=ONE_AT_A_TIME)
    requests = [talk.arrive(client, "document") for client in ("ada", "ada", "bob", "ada", "bob")]
    talk.cancel(requests[2])
    talk.serve_all()
    assert talk.order == [*requests[:2], *requests[3:]]


def test_a_pool_gives_the_oldest_request_to_any_worker_with_room() -> None:
    """No worker idles while another has a queue."""
    talk = Scene("pooled_fcfs", workers=("w1", "w2"), settings=ONE_AT_A_TIME)
    requests = [talk.arrive("ada", prompt) for prompt in ("one", "two", "six", "ten", "red")]
    talk.serve(requests[1])
    talk.serve(requests[2])
    assert talk.order == requests[:4]
    assert {talk.worker_of(request) for request in requests[1:4]} == {talk.worker_of(requests[1])}


def test_a_pool_spreads_over_the_workers_with_the_fewest_requests() -> None:
    """If several workers have room, the load decides."""
    talk = Scene("pooled_fcfs", workers=("w1", "w2"))
    requests = [talk.arrive("ada", prompt) for prompt in ("one", "two", "six", "ten")]
    placed = [talk.worker_of(request) for request in requests]
    assert sorted(placed) == ["w1", "w1", "w2", "w2"]


def test_a_pool_serves_models_that_share_a_worker_in_order_of_arrival() -> None:
    """A model whose queue is never empty does not starve another."""
    talk = Scene("pooled_fcfs", workers=(), settings=ONE_AT_A_TIME)
    talk.join("w1", MODEL, "qwen")
    models = (MODEL, MODEL, "qwen", MODEL, "qwen")
    requests = [talk.arrive("ada", "document", model=model) for model in models]
    talk.serve_all()
    assert talk.order == requests


def test_a_model_whose_workers_are_full_blocks_no_other_model() -> None:
    """The oldest request may have to wait longer."""
    talk = Scene("pooled_fcfs", workers=(), settings=SchedulerSettings(window=FixedWindow(requests=1)))
    talk.join("w1", MODEL)
    talk.join("w2", "qwen")
    for model in (MODEL, MODEL, "qwen"):
        talk.arrive("ada", "document", model=model)
    assert [talk.requests[request].model for request in talk.order] == [MODEL, "qwen"]


def test_a_pool_keeps_requests_that_another_worker_serves() -> None:
    """When a worker leaves, only the requests that no other worker can take are rejected."""
    talk = Scene("pooled_fcfs", workers=("w1",), settings=ONE_AT_A_TIME)
    talk.join("w2", "qwen")
    running, lost = talk.arrive("ada", "one", model="qwen"), talk.arrive("ada", "two", model="qwen")
    talk.arrive("ada", "one")
    kept = talk.arrive("ada", "two")
    talk.leave("w2")
    assert talk.refusals == {lost: Refusal.NO_WORKER}
    talk.serve(running)
    talk.serve_all()
    assert kept in talk.dispatched
