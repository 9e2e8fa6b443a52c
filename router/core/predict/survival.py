"""When a running answer will end, judged by how long past answers were: the two stages of BalanceRoute's predictors.

Of past answers longer than the `age` of a running one, p is the share that ended within the horizon H, and mu the mean
of what those still had to go. If p is at least the gate, p * mu + (1 - p) * H tokens are left; otherwise the answer is
predicted to outlive the horizon, because mu says little where few answers end ("Tackling the Data-Parallel Load
Balancing Bottleneck in LLM Serving", Appendices C.1 to C.2.3).
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from itertools import accumulate
from math import inf
from typing import Final

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request
from router.core.predict.output_length import OutputPredictor

REFIT_SHARE: Final = 32
"""Lengths are sorted again once as many are new as this fraction (1/n) of all."""
ANSWERS_OF_MODEL: Final = 10_000
"""Answers remembered of each model."""
PROMPTS: Final = 10_000
"""Prompts whose answers are remembered by themselves: those answered last."""
ANSWERS_OF_PROMPT: Final = 64
"""Answers remembered of each of these."""


class PastLengths:
    """The lengths of the latest answers, sorted now and then."""

    __slots__ = ("_latest", "_new", "_sorted", "_sums")

    def __init__(self, limit: int) -> None:
        """`limit`: how many lengths are kept."""
        self._latest: deque[int] = deque(maxlen=limit)
        self._new = 0
        self._sorted: list[int] = []
        self._sums = [0]
        """The sums of the first 0, 1, 2, ... of the sorted lengths."""

    def record(self, tokens: int) -> None:
        """Note the length of an answer, in tokens."""
        self._latest.append(tokens)
        self._new += 1
        if self._new * REFIT_SHARE >= len(self._latest):
            self._new = 0
            self._sorted = sorted(self._latest)
            self._sums = [0, *accumulate(self._sorted)]

    def remaining(self, age: int, horizon: float, gate: float) -> float | None:
        """Return the tokens that an answer of this age has left, at most `horizon`; None if no past answer was longer
        than that.
        """
        lengths = self._sorted
        alive = bisect_right(lengths, age)
        if alive == len(lengths):
            return None
        ended = bisect_right(lengths, age + horizon)
        share = (ended - alive) / (len(lengths) - alive)
        if ended == alive or share < gate:
            return horizon
        mean = (self._sums[ended] - self._sums[alive]) / (ended - alive) - age
        return mean if share == 1 else share * mean + (1 - share) * horizon


class SurvivalLengths(OutputPredictor):
    """Judges by the answers of one model, whatever the prompts were ("empirical survival")."""

    def __init__(self, gate: float) -> None:
        """`gate`: the least p with which an answer is predicted to end within the horizon."""
        self._gate = gate
        self._models: dict[str, PastLengths] = {}

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        past = self._models.get(request.model)
        predicted = None if past is None else past.remaining(age, horizon, self._gate)
        return horizon if predicted is None else predicted

    def answer_ended(self, request: Request, tokens: int) -> None:
        if (past := self._models.get(request.model)) is None:
            past = self._models[request.model] = PastLengths(ANSWERS_OF_MODEL)
        past.record(tokens)


class ExactMatchLengths(OutputPredictor):
    """Judges by the answers to the same prompt, or else like `SurvivalLengths` ("per-prompt memorization")."""

    def __init__(self, gate: float) -> None:
        """`gate`: as in `SurvivalLengths`."""
        self._gate = gate
        self._prompts: OrderedDict[tuple[object, ...], PastLengths] = OrderedDict()
        self._any_prompt = SurvivalLengths(gate)

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        past = self._prompts.get(_prompts_key(request))
        predicted = None if past is None else past.remaining(age, horizon, self._gate)
        return self._any_prompt.remaining(request, age, horizon) if predicted is None else predicted

    def answer_ended(self, request: Request, tokens: int) -> None:
        self._any_prompt.answer_ended(request, tokens)
        key = _prompts_key(request)
        if (past := self._prompts.pop(key, None)) is None:
            past = PastLengths(ANSWERS_OF_PROMPT)
        past.record(tokens)
        self._prompts[key] = past
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)


def _prompts_key(request: Request) -> tuple[object, ...]:
    """Return what only requests of one model with the same prompts share. A prompt's last hash covers all before it."""
    return request.model, *[(prompt.hashes[-HASH_BYTES:], prompt.size, prompt.tokens) for prompt in request.prompts]
