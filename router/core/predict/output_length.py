"""Predictions of how long answers will be.

`OutputLengths` learns from a client's past answers and the limits that it sets. A limit costs a client nothing to set.
What a request will hold of a worker's KV cache is predicted from the lengths of its client's answers as a share of
their limits: the whole limit if limits are exact, little if every request sets the same large one. And no answer is
predicted to be longer than a few times the mean of those before it, whatever its limit. One that is grows in the
forecast as it streams (`fleet/in_flight`).

There is one question, how many output tokens a request still produces, and there are two occasions to learn: an answer
ended, or a worker's attempt at one. `OutputPredictions` passes each of them on once. The predictors differ in what they
count as likely, because each serves a rule of its own:

    predictor          learns from                      used for
    -----------------  -------------------------------  ------------------------------------------------------------
    OutputLengths      answers, by client and model     the KV cache that a request will hold; how long a call runs
    ReservedOutput     the same                         the bound on the service gap
    WorkerMean         attempts at one worker           the KV cache that the next request there will hold
    ClientMeans        attempts at one worker           VTC (predict), `vtc_predict`
    StatedLimit        nothing                          VTC (oracle), `vtc_oracle`
    RecentMean         recent attempts at one worker    the load of a worker under Preble
    SurvivalLengths    answers, by model                BR-H, `brh`: which running answers end soon
    ExactMatchLengths  answers, by prompt and model     the same
    TrueLength         nothing                          the same, in simulations

Means of the output at one worker learn from attempts, not from answers: an attempt that failed there counts with what
the worker produced, and an answer that two workers computed counts at each with its part.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import Final, Protocol

from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, WorkerId
from router.core.predict.sliding_sum import SlidingSum, TimedAmount


class OutputPredictor(Protocol):
    """Predicts the output of requests, in tokens."""

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        """Return how many output tokens a request will produce beyond the `age` that it has; never negative.

        `horizon`: how many tokens ahead the caller looks. The result is at most that: a request predicted to outlive
        the horizon has exactly `horizon` left.
        """

    def answer_ended(self, request: Request, tokens: int) -> None:  # noqa: ARG002 - some predictors learn otherwise
        """Learn from an answer that ended with this many tokens, whichever workers computed them."""
        return

    def attempt_ended(self, charge: Charge) -> None:  # noqa: ARG002 - some predictors learn otherwise
        """Learn from an attempt that ended. `charge`: its last one, whose `after` is all that the worker did for it."""
        return


def remaining_of(predicted: float, age: float, horizon: float) -> float:
    """Return what is left of a predicted length after `age`, in tokens: from 0 to `horizon`."""
    return min(max(0.0, predicted - age), horizon)


FIRST_OUTPUT: Final = 256
"""Output tokens expected of the first request for a model, if it sets no limit."""
OUTPUT_WEIGHT: Final = 0.2
"""Weight of the newest length in the running mean (VTC's predictor averages over five)."""
LIMIT_MEMORY: Final = 0.97
"""Factor by which the weight of past answers and their limits decays with each new one: about the last thirty count."""
MEAN_FACTOR: Final = 4.0
"""An answer is predicted to have at most this many times the mean length of its client's answers ..."""
LEAST_BOUND: Final = 256.0
"""... or this many tokens, if that is more: short answers vary by a larger factor, and hold little."""


@dataclass(slots=True)
class LengthHistory:
    """Past answers of one client, or of all clients, by one model."""

    mean: float
    """Tokens; the newest answers count most."""
    tokens: float = 0.0
    limits: float = 0.0
    """Decaying sums over answers that had a limit: their lengths, and their limits."""

    def learn(self, tokens: int, limit: int | None) -> None:
        """Add an answer."""
        self.mean += OUTPUT_WEIGHT * (tokens - self.mean)
        if limit is not None:
            self.tokens = self.tokens * LIMIT_MEMORY + tokens
            self.limits = self.limits * LIMIT_MEMORY + limit

    def forecast(self, limit: int) -> float:
        """Return the predicted output tokens of the next answer with this limit."""
        share = min(1.0, self.tokens / self.limits) if self.limits else 1.0
        return min(limit * share, max(LEAST_BOUND, MEAN_FACTOR * self.mean))


class OutputLengths(OutputPredictor):
    """Predicts the length that about half of such requests exceed, from the histories of every client and model.

    A request's limit counts only in proportion to the client's past answers and limits, or else to the model's.
    """

    def __init__(self, client_limit: int) -> None:
        """`client_limit`: histories kept; beyond it the least recently updated is dropped."""
        self._limit = client_limit
        self._pasts: dict[tuple[ClientId | None, str], LengthHistory] = {}

    def mean_length(self, request: Request) -> float:
        """Return the mean length of the client's answers by this model, or else of all answers by it, in tokens."""
        past = self._past(request)
        return float(FIRST_OUTPUT) if past is None else past.mean

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        limit, past = request.output_limit, self._past(request)
        if limit is None:
            predicted = float(FIRST_OUTPUT) if past is None else past.mean
        else:
            predicted = min(limit, MEAN_FACTOR * FIRST_OUTPUT) if past is None else past.forecast(limit)
        return min(remaining_beyond(predicted, inf if limit is None else limit, age), horizon)

    def answer_ended(self, request: Request, tokens: int) -> None:
        if request.output_limit == 0:
            return  # for example an embedding, which says nothing about the length of answers
        for client in (None, request.client):
            key = (client, request.model)
            past = self._pasts.pop(key, None) or LengthHistory(float(tokens))
            past.learn(tokens, request.output_limit)
            self._pasts[key] = past
            if len(self._pasts) > self._limit:
                del self._pasts[next(iter(self._pasts))]

    def _past(self, request: Request) -> LengthHistory | None:
        return self._pasts.get((request.client, request.model)) or self._pasts.get((None, request.model))


class ReservedOutput(OutputPredictor):
    """Predicts the request's own limit, or else the mean that `OutputLengths` has learned.

    Kept beside `OutputLengths` because the bound on the service gap must cover all that a request may produce (M in
    "Locality-aware Fair Scheduling in LLM Serving", Theorem 4.1), however unlikely.
    """

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        limit = request.output_limit
        return remaining_of(ceil(self._lengths.mean_length(request)) if limit is None else limit, age, horizon)


def remaining_beyond(predicted: float, most: float, so_far: float) -> float:
    """Return the output tokens predicted beyond those that a request has `so_far`, which may exceed the prediction.

    An answer that went far is predicted to go as far again, but not beyond `most` in all.
    """
    return min(max(predicted - so_far, so_far), max(0, most - so_far))


class OutputPredictions:
    """The common predictors, and those that others have added for single workers."""

    def __init__(self, client_limit: int = 10_000) -> None:
        """`client_limit`: (client, model) pairs whose answers are remembered."""
        self.lengths = OutputLengths(client_limit)
        self.reserved = ReservedOutput(self.lengths)
        self._of_answers: list[OutputPredictor] = []
        self._of_worker: defaultdict[WorkerId, list[OutputPredictor]] = defaultdict(list)

    def add(self, predictor: OutputPredictor, worker: WorkerId) -> None:
        """Let a predictor learn from the attempts at this worker, until it is removed or the worker is forgotten."""
        self._of_worker[worker].append(predictor)

    def add_for_answers(self, predictor: OutputPredictor) -> None:
        """Let a predictor learn from all answers."""
        self._of_answers.append(predictor)

    def remove(self, predictor: OutputPredictor, worker: WorkerId) -> None:
        """Stop teaching a predictor. Raises ValueError if it was not added."""
        predictors = self._of_worker[worker]
        predictors.remove(predictor)
        if not predictors:
            del self._of_worker[worker]

    def forget_worker(self, worker: WorkerId) -> None:
        """Drop all predictors of a worker that left long ago."""
        self._of_worker.pop(worker, None)

    def answer_ended(self, request: Request, tokens: int) -> None:
        """Learn from an answer that is complete, or whose client left. `tokens`: its output over all attempts."""
        self.lengths.answer_ended(request, tokens)
        for predictor in self._of_answers:
            predictor.answer_ended(request, tokens)

    def attempt_ended(self, charge: Charge) -> None:
        """Learn from an attempt that ended in whatever way. `charge`: the last one of its bill."""
        for predictor in self._of_worker.get(charge.worker, ()):
            predictor.attempt_ended(charge)


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


class StatedLimit(OutputPredictor):
    """Predicts the limit, which is the true length if the request asked for exactly that, and zero without a limit.

    Kept beside `OutputLengths`, which does not believe limits, because "VTC (oracle)" is defined by it ("Fairness in
    Serving Large Language Models", section 5.1).
    """

    def __init__(self, error: float, random: Random) -> None:
        """`error`: each prediction is the limit times a random number from 1 - error to 1 + error."""
        self._error = error
        self._random = random

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        length = float(request.output_limit or 0)
        if self._error:
            length *= self._random.uniform(1 - self._error, 1 + self._error)
        return remaining_of(length, age, horizon)


@dataclass(frozen=True, slots=True)
class TrueOutputs:
    """What a simulation adds to a policy's parameters, so that `oracle` can be chosen there."""

    of: Callable[[Request], int] | None = None
    """Returns how many output tokens a request will have; None outside of simulations."""


class TrueLength(OutputPredictor):
    """Predicts what will happen."""

    def __init__(self, of: Callable[[Request], int]) -> None:
        """`of`: returns a request's output tokens."""
        self._of = of

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        return remaining_of(self._of(request), age, horizon)
