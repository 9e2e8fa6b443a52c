"""Means of the output at one worker: the predictors of papers, and that of the window.

They learn from attempts, not from answers: an attempt that failed there counts with what the worker produced, and an
answer that two workers computed counts at each with its part.
"""

from math import inf
from typing import Final

from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request
from router.core.predict.output_length import OUTPUT_WEIGHT, OutputPredictor, remaining_of
from router.core.predict.sliding_sum import SlidingSum, TimedAmount

ATTEMPT_MEMORY: Final = 0.97
"""Factor by which the weight of past attempts decays with each new one: about the last thirty count."""


class ClientMeans(OutputPredictor):
    """The mean output of each client's last requests, as in VTC with output prediction.

    Kept beside `OutputLengths` because VTC's rule belongs to the algorithm: the mean of the last five answers begins at
    zero, so a new client is charged nothing in advance, and output limits do not count ("Fairness in Serving Large
    Language Models", the code published with it).
    """

    def __init__(self) -> None:
        self._means: dict[ClientId, float] = {}

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        return remaining_of(self._means.get(request.client, 0.0), age, horizon)

    def attempt_ended(self, charge: Charge) -> None:
        """Learn from attempts that were charged for a prompt. Of the others, those that were refused say nothing, and
        those that went on with an answer have only the rest of it.
        """
        if charge.after.extend or charge.after.cached:
            mean = self._means.get(charge.client, 0.0)
            self._means[charge.client] = mean + OUTPUT_WEIGHT * (charge.after.output - mean)

    def forget(self, client: ClientId) -> None:
        """Drop what was learned of a client."""
        self._means.pop(client, None)


class WorkerMean(OutputPredictor):
    """The mean output of the requests that a worker ran, for a request that is yet to be chosen.

    The window keeps room in the KV cache for the next request, whichever it will be, so nothing of the request itself
    can count. The mean begins at zero: an empty worker has room for its first request in any case.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        """Decaying sum of the output of ended attempts, in tokens."""
        self.mean = 0.0
        """Output tokens per attempt."""

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:  # noqa: ARG002 - all are alike
        return remaining_of(self.mean, age, horizon)

    def attempt_ended(self, charge: Charge) -> None:
        """Learn from attempts with any output: others, such as embeddings, hold no more than their prompt."""
        if charge.after.output:
            self._sum = self._sum * ATTEMPT_MEMORY + charge.after.output
            self.mean = self._sum * (1 - ATTEMPT_MEMORY)


class RecentMean(OutputPredictor):
    """The mean output of the requests that ended at a worker within the last H seconds, as in Preble.

    Kept beside `WorkerMean` because Preble's load counts the requests of exactly that time, each with the mean decode
    length in it ("Preble: Efficient Distributed Prompt Scheduling for LLM Serving", Algorithm 2).
    """

    def __init__(self, seconds: float, first: float, now: float) -> None:
        """`seconds`: H. `first`: output tokens expected as long as no request ended within H."""
        self._outputs = SlidingSum(seconds)
        self._first = first
        self._now = now

    def advance(self, now: float) -> None:
        """Drop what is older than H seconds at `now`, which is the time of what ends from now on."""
        self._now = now
        self._outputs.advance(now)

    @property
    def mean(self) -> float:
        """Output tokens per request."""
        return self._outputs.mean if len(self._outputs) else self._first

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:  # noqa: ARG002 - all are alike
        return remaining_of(self.mean, age, horizon)

    def attempt_ended(self, charge: Charge) -> None:
        """A request without output says nothing about the length of answers."""
        if charge.after.output:
            self._outputs.add(TimedAmount(self._now, charge.after.output))
