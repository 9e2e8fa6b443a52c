"""A rank's projected load is the sum over its requests, each until it is predicted to end."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from router.core.model.cost import Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.balance.projection import LoadProjection
from router.core.predict.output_length import TrueLength

HORIZON = 8
W = WorkerId("w1")


def request(name: str) -> Request:
    return Request(RequestId(name), ClientId("ada"), "llama", ())


def charge(name: str, before: int, after: int) -> Charge:
    return Charge(RequestId(name), ClientId("ada"), W, Tokens(output=before), Tokens(output=after), 0.0)


class Planned:
    """The true lengths of requests, and how often each was asked for."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths
        self.asked: list[str] = []

    def __call__(self, asked: Request) -> int:
        self.asked.append(asked.id)
        return self.lengths[asked.id]


@given(lengths=st.lists(st.integers(1, 20), max_size=5), done=st.integers(0, 6))
def test_each_request_counts_until_it_ends(lengths: list[int], done: int) -> None:
    """With true predictions, the load in h steps is the context of all that still run then."""
    names = [f"r{number}" for number in range(len(lengths))]
    projection = LoadProjection(TrueLength(Planned(dict(zip(names, lengths, strict=True)))), HORIZON, 1)
    running: dict[str, tuple[int, int]] = {}
    for name, length, tokens in zip(names, lengths, count(10, 7), strict=False):
        projection.add(request(name), W, tokens)
        for step in range(min(done, length - 1)):
            projection.request_charged(charge(name, step, step + 1))
        running[name] = tokens + min(done, length - 1), max(1, length - done)
    load = sum(tokens for tokens, _ in running.values())
    # At the horizon itself it makes no difference whether a request has just ended: it was predicted to outlive it.
    expected = [
        sum(tokens + step for tokens, left in running.values() if step < left or left >= HORIZON)
        for step in range(HORIZON + 1)
    ]
    assert list(projection.loads(W, load)) == expected


def test_a_prediction_is_refreshed_now_and_then_and_when_it_is_used_up() -> None:
    """It is made again after `refresh` tokens, and at once when less than one step would be left."""
    planned = Planned({"r": 6})
    projection = LoadProjection(TrueLength(planned), HORIZON, 4)
    projection.add(request("r"), W, 10)
    assert len(planned.asked) == 1
    for step in range(3):
        projection.request_charged(charge("r", step, step + 1))
    assert len(planned.asked) == 1
    projection.request_charged(charge("r", 3, 4))
    assert len(planned.asked) == 2
    projection.request_charged(charge("r", 4, 6))  # two tokens at once: the prediction of two is used up
    assert len(planned.asked) == 3
    assert projection.loads(W, 16) == [16, *[0] * HORIZON]  # but while it runs, it counts for one step


def test_what_an_earlier_run_charged_is_not_taken_from_the_age() -> None:
    """A request that is taken over is as old as its output, though what an earlier run charged is taken back first."""
    projection = LoadProjection(TrueLength(Planned({"r": 152})), HORIZON, 4)
    projection.add(request("r"), W, 10)
    projection.request_charged(charge("r", 100, 0))
    projection.request_charged(charge("r", 0, 150))
    assert projection.loads(W, 160) == [160, 161, *[0] * (HORIZON - 1)]


def test_without_predictions_every_request_outlives_the_horizon() -> None:
    """Without a predictor, a rank's load grows by one token per request and step."""
    projection = LoadProjection(None, 3, 4)
    projection.add(request("r"), W, 10)
    projection.add(request("s"), W, 5)
    assert list(projection.loads(W, 15)) == [15, 17, 19, 21]
    projection.request_ended(request("r"), W)
    assert list(projection.loads(W, 5)) == [5, 6, 7, 8]
