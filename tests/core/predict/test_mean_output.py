"""Each mean of the output at one worker counts the attempts that its user needs."""

import pytest

from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.predict.output_length import ClientMeans, OutputPredictor, RecentMean, WorkerMean

SECONDS = 10.0


def asked(client: str = "ada", limit: int | None = None) -> Request:
    return Request(RequestId("r"), ClientId(client), "llama", (), output_limit=limit)


def ended(after: Tokens, client: str = "ada") -> Charge:
    """Return the last charge of an attempt that computed this in all."""
    return Charge(RequestId("r"), ClientId(client), WorkerId("w"), NOTHING, after, 0.0)


def answered(output: int, client: str = "ada") -> Charge:
    """Return the last charge of an attempt with a prompt of 4 tokens and this output."""
    return ended(Tokens(4, 0, output), client)


def recent() -> RecentMean:
    return RecentMean(SECONDS, first=45, now=0.0)


def test_a_clients_newest_answer_counts_a_fifth() -> None:
    """A client's mean begins at zero and leaves out the answers of other clients."""
    means = ClientMeans()
    means.attempt_ended(answered(100))
    means.attempt_ended(answered(70))
    means.attempt_ended(answered(500, "bob"))
    assert means.remaining(asked()) == pytest.approx(20 + (70 - 20) / 5)
    assert means.remaining(asked("cyd")) == 0


def test_a_forgotten_client_begins_at_zero_again() -> None:
    """Nothing is kept of a client that is forgotten."""
    means = ClientMeans()
    means.attempt_ended(answered(100))
    means.forget(ClientId("ada"))
    assert means.remaining(asked()) == 0


@pytest.mark.parametrize("after", [NOTHING, Tokens(0, 0, 30)], ids=["refused", "continued"])
def test_a_part_of_an_answer_does_not_lower_a_clients_mean(after: Tokens) -> None:
    """A refused attempt has no answer, and one that continues another attempt has only the rest of it."""
    means = ClientMeans()
    means.attempt_ended(answered(100))
    means.attempt_ended(ended(after))
    assert means.remaining(asked()) == 20


@pytest.mark.parametrize("predictor", [WorkerMean(), recent()], ids=["window", "preble"])
def test_an_attempt_without_output_does_not_change_a_workers_mean(predictor: OutputPredictor) -> None:
    """An embedding says nothing about the length of answers."""
    predictor.attempt_ended(answered(90))
    before = predictor.remaining(asked())
    predictor.attempt_ended(answered(0))
    assert predictor.remaining(asked()) == before > 0


def test_a_workers_mean_approaches_the_length_of_its_answers() -> None:
    """A worker's mean begins at zero, and after many answers of one length it is that length, whoever asked."""
    mean = WorkerMean()
    assert mean.mean == 0
    for number in range(400):
        mean.attempt_ended(answered(80, f"client {number}"))
    assert mean.remaining(asked(limit=5)) == pytest.approx(80, rel=0.01)


def test_a_recent_mean_drops_what_is_too_old() -> None:
    """Without recent answers the first value counts again."""
    mean = recent()
    assert mean.mean == 45
    mean.attempt_ended(answered(100))
    mean.advance(6.0)
    mean.attempt_ended(answered(200))
    assert mean.mean == 150
    mean.advance(12.0)
    assert mean.mean == 200
    mean.advance(16.0)
    assert mean.mean == 45
