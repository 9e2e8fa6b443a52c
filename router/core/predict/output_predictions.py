"""The output predictors of one scheduler, which all learn through one object."""

from collections import defaultdict

from router.core.model.cost import Charge
from router.core.model.request import Request, WorkerId
from router.core.predict.output_length import OutputLengths, OutputPredictor, ReservedOutput


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
