"""VTC with output prediction charges predicted output in advance, which keeps clients closer together."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.request import ClientId
from router.core.policies.vtc.vtc_parameters import OracleParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

ADA = ClientId("ada")
QUESTION = 4 * CHUNK_TOKENS
"""The price of "why?"."""


def served(scene: Scene, client: str) -> float:
    """Return c_i: the client's charges and lifts."""
    deficit = scene.deficit(client).order
    assert deficit is not None
    return -deficit


def test_the_oracle_charges_the_limit_at_once() -> None:
    """Output up to the limit adds nothing while it streams, output beyond it does, and output that is not produced is
    refunded.
    """
    scene = Scene("vtc_oracle", settings=ONE_AT_A_TIME)
    answer = scene.arrive("ada", "why?", limit=100)
    assert served(scene, "ada") == QUESTION + 2 * 100
    scene.progress(answer, 60)
    assert served(scene, "ada") == QUESTION + 2 * 100
    scene.progress(answer, 130)
    assert served(scene, "ada") == QUESTION + 2 * 130
    scene.finish(answer, 130)
    scene.serve(scene.arrive("bob", "why?", limit=100), output=30)
    assert served(scene, "bob") == served(scene, "ada") + QUESTION + 2 * 30


def test_a_prediction_is_the_mean_of_the_last_answers() -> None:
    """A client's first prediction is zero; then each newest answer counts a fifth."""
    scene = Scene("vtc_predict", settings=ONE_AT_A_TIME)
    for output, foreseen in ((100, 0), (70, 20), (0, 30), (0, 24)):
        before = served(scene, "ada") if scene.order else 0.0
        answer = scene.arrive("ada", "why?")
        assert served(scene, "ada") == before + QUESTION + 2 * foreseen
        scene.serve(answer, output=output)
        assert served(scene, "ada") == before + QUESTION + 2 * output


def test_a_prediction_uses_the_clients_own_answers() -> None:
    """Other clients' answers do not count, and neither does a call that was refused."""
    scene = Scene("vtc_predict", settings=ONE_AT_A_TIME)
    scene.serve(scene.arrive("ada", "why?"), output=500)
    before = served(scene, "ada")
    other = scene.arrive("bob", "why?")
    assert served(scene, "bob") == before + QUESTION
    scene.refuse(other)
    for _ in range(2):
        refused = scene.arrive("ada", "why?")
        assert served(scene, "ada") == before + QUESTION + 2 * 100
        scene.refuse(refused)
        assert served(scene, "ada") == before


def test_a_client_with_long_answers_in_flight_waits() -> None:
    """Of two clients with equal prompts, the one with long answers is not given three slots before they stream."""
    places = {}
    for policy in ("vtc", "vtc_oracle"):
        scene = Scene(policy, settings=SchedulerSettings(window=FixedWindow(requests=5)))
        filler = [scene.arrive("cyd", "x") for _ in range(5)]
        for _ in range(5):
            scene.arrive("ada", "why?", limit=1000)
            scene.arrive("bob", "why?", limit=10)
        for request in filler:
            scene.serve(request)
        places[policy] = [scene.requests[request].client for request in scene.order[5:]]
    assert places["vtc"].count(ADA) >= 2
    assert places["vtc_oracle"].count(ADA) == 1


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.booleans()), min_size=1, max_size=12))
def test_in_the_end_every_variant_charges_the_same(answers: list[tuple[int, int, bool]]) -> None:
    """Once nothing is in flight, a client was charged what plain VTC charges, whatever was predicted."""
    charged = []
    for policy in ("vtc", "vtc_predict", "vtc_oracle"):
        scene = Scene(policy, OracleParameters(error=0.5), settings=SchedulerSettings(window=FixedWindow(requests=3)))
        for limit, _, _ in answers:
            scene.arrive("ada", "why?", limit=limit)
        for number, (_, output, refused) in enumerate(answers):
            request = scene.order[number]
            if refused:
                scene.refuse(request)
            else:
                scene.progress(request, output // 2)
                scene.finish(request, output)
        charged.append(served(scene, "ada"))
    assert charged == pytest.approx([charged[0]] * 3)


@pytest.mark.parametrize(("policy", "holds"), [("vtc_oracle", True), ("vtc", False)])
def test_a_perfect_prediction_never_lags(policy: str, holds: bool) -> None:
    """With limits that equal the lengths, waiting clients differ by at most one request; without, by all in flight."""
    random, scene = Random(2), Scene(policy, settings=SchedulerSettings(window=FixedWindow(requests=8)))
    lengths = {"ada": 400, "bob": 50}
    most = QUESTION + 2 * max(lengths.values())
    worst = 0.0
    for _ in range(300):
        for client, length in lengths.items():
            while scene.scheduler.backlog.of_client(ClientId(client)) < 3:
                scene.arrive(client, "why?", limit=random.randint(1, length))
        worst = max(worst, abs(served(scene, "ada") - served(scene, "bob")))
        request = random.choice(list(scene.scheduler.attempts))
        scene.finish(request, scene.requests[request].output_limit)
    assert (worst <= most) == holds


def test_an_oracles_error_is_bounded() -> None:
    """Each limit is multiplied by its own number, drawn within the error."""
    scene = Scene("vtc_oracle", OracleParameters(error=0.5), settings=ONE_AT_A_TIME)
    foreseen = []
    for _ in range(50):
        before = served(scene, "ada") if scene.order else 0.0
        answer = scene.arrive("ada", "why?", limit=1000)
        foreseen.append((served(scene, "ada") - before - QUESTION) / 2)
        scene.serve(answer)
    assert min(foreseen) >= 500
    assert max(foreseen) <= 1500
    assert max(foreseen) - min(foreseen) > 800


def test_a_negative_error_is_rejected() -> None:
    """The error is a magnitude and has no sign."""
    with pytest.raises(ValueError, match="error"):
        OracleParameters(-0.1)
