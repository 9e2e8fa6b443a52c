"""BR-H counts a request only until it is predicted to end."""

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.balance.balance_parameters import BrhParameters
from router.core.predict.output_length import TrueOutputs
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import Scene

TWO_PLACES = SchedulerSettings(window=FixedWindow(2, 10**6))
OUTPUTS = {"ada1": 3, "ada2": 500, "ada3": 500, "ada4": 500}
ORACLE = TrueOutputs(lambda request: OUTPUTS.get(request.id, 500))


@pytest.mark.parametrize(("predictor", "first"), [("none", 1), ("oracle", 0)])
def test_a_load_that_soon_goes_leaves_no_room_for_more(predictor: str, first: int) -> None:
    """The fullest rank's long request ends within the horizon: whoever knows that does not fill others up to it."""
    parameters = BrhParameters(predictor=predictor, horizon=20, discount=1.0)  # type: ignore[arg-type]
    scene = Scene("brh", parameters, ORACLE, workers=(), settings=TWO_PLACES)
    for worker in ("w1", "w2"):
        scene.join(worker, barrier="group")
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (40, 4, 4, 4), strict=True)]
    assert [scene.worker_of(request) for request in running] == ["w1", "w2", "w2", "w1"]
    waiting = [scene.arrive("ada", "x"), scene.arrive("ada", "y" * 30)]
    scene.serve(running[2], 500)
    assert scene.order[4:] == [waiting[first]]


def test_only_a_simulation_has_an_oracle() -> None:
    """Without the true outputs, the oracle is refused when the scheduler is built."""
    with pytest.raises(ValueError, match="only a simulation knows the true outputs"):
        Scene("brh", BrhParameters(predictor="oracle"))
