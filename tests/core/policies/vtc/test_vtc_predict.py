"""VTC with output prediction, in scenarios: what is charged when, and how much closer clients stay."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.request import ClientId
from router.core.policies.vtc.vtc_predict import OracleParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

ADA = ClientId("ada")
QUESTION = 4 * CHUNK_TOKENS
"""The price of "why?"."""


def served(talk: Scene, client: str) -> float:
    """c_i: the client's charges and lifts."""
    deficit = talk.deficit(client).order
    assert deficit is not None
    return -deficit


def test_the_oracle_charges_the_limit_at_once() -> None:
    """Nothing is added while the answer streams up to the limit; output beyond it is; unproduced output is refunded."""
    talk = Scene("vtc_oracle", settings=ONE_AT_A_TIME)
    answer = talk.arrive("ada", "why?", limit=100)
    assert served(talk, "ada") == QUESTION + 2 * 100
    talk.progress(answer, 60)
    assert served(talk, "ada") == QUESTION + 2 * 100
    talk.progress(answer, 130)
    assert served(talk, "ada") == QUESTION + 2 * 130
    talk.finish(answer, 130)
    talk.serve(talk.arrive("bob", "why?", limit=100), output=30)
    assert served(talk, "bob") == served(talk, "ada") + QUESTION + 2 * 30


def test_a_prediction_is_the_mean_of_the_last_answers() -> None:
    """A client's first prediction is zero; then each newest answer counts a fifth."""
    talk = Scene("vtc_predict", settings=ONE_AT_A_TIME)
    for output, foreseen in ((100, 0), (70, 20), (0, 30), (0, 24)):
        before = served(talk, "ada") if talk.order else 0.0
        answer = talk.arrive("ada", "why?")
        assert served(talk, "ada") == before + QUESTION + 2 * foreseen
        talk.serve(answer, output=output)
        assert served(talk, "ada") == before + QUESTION + 2 * output


def test_a_prediction_uses_the_clients_own_answers() -> None:
    """Other clients' answers do not count, and neither does a call that was refused."""
    talk = Scene("vtc_predict", settings=ONE_AT_A_TIME)
    talk.serve(talk.arrive("ada", "why?"), output=500)
    before = served(talk, "ada")
    other = talk.arrive("bob", "why?")
    assert served(talk, "bob") == before + QUESTION
    talk.refuse(other)
    for _ in range(2):
        refused = talk.arrive("ada", "why?")
        assert served(talk, "ada") == before + QUESTION + 2 * 100
        talk.refuse(refused)
        assert served(talk, "ada") == before


def test_a_client_with_long_answers_in_flight_waits() -> None:
    """Of two clients with equal prompts, the one with long answers is not given three slots before they stream."""
    places = {}
    for policy in ("vtc", "vtc_oracle"):
        talk = Scene(policy, settings=SchedulerSettings(window=FixedWindow(requests=5)))
        filler = [talk.arrive("cyd", "x") for _ in range(5)]
        for _ in range(5):
            talk.arrive("ada", "why?", limit=1000)
            talk.arrive("bob", "why?", limit=10)
        for request in filler:
            talk.serve(request)
        places[policy] = [talk.requests[request].client for request in talk.order[5:]]
    assert places["vtc"].count(ADA) >= 2
    assert places["vtc_oracle"].count(ADA) == 1


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.booleans()), min_size=1, max_size=12))
def test_in_the_end_every_variant_charges_the_same(answers: list[tuple[int, int, bool]]) -> None:
    """Whatever was predicted, once nothing is in flight a client was charged what plain VTC charges."""
    charged = []
    for policy in ("vtc", "vtc_predict", "vtc_oracle"):
        talk = Scene(policy, OracleParameters(error=0.5), settings=SchedulerSettings(window=FixedWindow(requests=3)))
        for limit, _, _ in answers:
            talk.arrive("ada", "why?", limit=limit)
        for number, (_, output, refused) in enumerate(answers):
            request = talk.order[number]
            if refused:
                talk.refuse(request)
            else:
                talk.progress(request, output // 2)
                talk.finish(request, output)
        charged.append(served(talk, "ada"))
    assert charged == pytest.approx([charged[0]] * 3)


@pytest.mark.parametrize(("policy", "holds"), [("vtc_oracle", True), ("vtc", False)])
def test_a_perfect_prediction_never_lags(policy: str, holds: bool) -> None:
    """With limits that equal the lengths, waiting clients differ by at most one request; without, by all in flight."""
    random, talk = Random(2), Scene(policy, settings=SchedulerSettings(window=FixedWindow(requests=8)))
    lengths = {"ada": 400, "bob": 50}
    most = QUESTION + 2 * max(lengths.values())
    worst = 0.0
    for _ in range(300):
        for client, length in lengths.items():
            while talk.scheduler.backlog.of_client(ClientId(client)) < 3:
                talk.arrive(client, "why?", limit=random.randint(1, length))
        worst = max(worst, abs(served(talk, "ada") - served(talk, "bob")))
        request = random.choice(list(talk.scheduler.attempts))
        talk.finish(request, talk.requests[request].output_limit)
    assert (worst <= most) == holds


def test_an_oracles_error_is_bounded() -> None:
    """Each limit is multiplied by its own number, drawn within the error."""
    talk = Scene("vtc_oracle", OracleParameters(error=0.5), settings=ONE_AT_A_TIME)
    foreseen = []
    for _ in range(50):
        before = served(talk, "ada") if talk.order else 0.0
        answer = talk.arrive("ada", "why?", limit=1000)
        foreseen.append((served(talk, "ada") - before - QUESTION) / 2)
        talk.serve(answer)
    assert min(foreseen) >= 500
    assert max(foreseen) <= 1500
    assert max(foreseen) - min(foreseen) > 800


def test_a_negative_error_is_rejected() -> None:
    """The error has no sign."""
    with pytest.raises(ValueError, match="error"):
        OracleParameters(-0.1)
