"""First come, first served holds in one worker's queue and for a pool."""

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Refusal
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import MODEL, ONE_AT_A_TIME, Scene


def test_a_queue_is_served_in_order_of_arrival() -> None:
    """The order does not depend on who sends a request or how much of it is cached, and cancelled
    requests are skipped.
    """
    scene = Scene("rr+fcfs", settings=ONE_AT_A_TIME)
    requests = [scene.arrive(client, "document") for client in ("ada", "ada", "bob", "ada", "bob")]
    scene.cancel(requests[2])
    scene.serve_all()
    assert scene.order == [*requests[:2], *requests[3:]]


def test_a_pool_gives_the_oldest_request_to_any_worker_with_room() -> None:
    """No worker with room idles while a request waits."""
    scene = Scene("pooled_fcfs", workers=("w1", "w2"), settings=ONE_AT_A_TIME)
    requests = [scene.arrive("ada", prompt) for prompt in ("one", "two", "six", "ten", "red")]
    scene.serve(requests[1])
    scene.serve(requests[2])
    assert scene.order == requests[:4]
    assert {scene.worker_of(request) for request in requests[1:4]} == {scene.worker_of(requests[1])}


def test_a_pool_spreads_over_the_workers_with_the_fewest_requests() -> None:
    """If several workers have room, the load decides."""
    scene = Scene("pooled_fcfs", workers=("w1", "w2"))
    requests = [scene.arrive("ada", prompt) for prompt in ("one", "two", "six", "ten")]
    placed = [scene.worker_of(request) for request in requests]
    assert sorted(placed) == ["w1", "w1", "w2", "w2"]


def test_a_pool_serves_models_that_share_a_worker_in_order_of_arrival() -> None:
    """A model whose queue is never empty does not starve another."""
    scene = Scene("pooled_fcfs", workers=(), settings=ONE_AT_A_TIME)
    scene.join("w1", MODEL, "qwen")
    models = (MODEL, MODEL, "qwen", MODEL, "qwen")
    requests = [scene.arrive("ada", "document", model=model) for model in models]
    scene.serve_all()
    assert scene.order == requests


def test_a_model_whose_workers_are_full_blocks_no_other_model() -> None:
    """A later request for another model goes at once, although the oldest one has to wait longer."""
    scene = Scene("pooled_fcfs", workers=(), settings=SchedulerSettings(window=FixedWindow(requests=1)))
    scene.join("w1", MODEL)
    scene.join("w2", "qwen")
    for model in (MODEL, MODEL, "qwen"):
        scene.arrive("ada", "document", model=model)
    assert [scene.requests[request].model for request in scene.order] == [MODEL, "qwen"]


def test_a_pool_keeps_requests_that_another_worker_serves() -> None:
    """When a worker leaves, only the requests that no other worker can take are rejected."""
    scene = Scene("pooled_fcfs", workers=("w1",), settings=ONE_AT_A_TIME)
    scene.join("w2", "qwen")
    running, lost = scene.arrive("ada", "one", model="qwen"), scene.arrive("ada", "two", model="qwen")
    scene.arrive("ada", "one")
    kept = scene.arrive("ada", "two")
    scene.leave("w2")
    assert scene.refusals == {lost: Refusal.NO_WORKER}
    scene.serve(running)
    scene.serve_all()
    assert kept in scene.dispatched
