"""What one worker computed by its own counters, beside what was charged for what it did."""

from router.core.accounts import NOTHING, Tokens
from router.core.model import WorkReport


class EngineWork:
    """Totals since the worker joined; they fall only where a charge was too high and is put right."""

    def __init__(self) -> None:
        self.charged = NOTHING
        """What clients were charged, as far as it is served."""
        self.input_tokens: float | None = None
        """Of prompts, computed by the engine's count since its first report; None where it does not count."""
        self.output_tokens: float | None = None
        self._last: WorkReport | None = None
        self._produced = 0.0
        self._running = 0
        self._at = 0.0

    def charge(self, before: Tokens, after: Tokens) -> None:
        """A client's bill for what was served here changed."""
        had, has = before, after
        self.charged = self.charged.plus(
            Tokens(has.extend - had.extend, has.cached - had.cached, has.output - had.output)
        )

    def reported(self, report: WorkReport | None) -> None:
        """Take in the engine's counters; those that fell began anew."""
        before, self._last = self._last, report
        self._produced = 0.0
        if report is None:
            return
        if report.input_tokens is not None:
            had = None if before is None else before.input_tokens
            self.input_tokens = (self.input_tokens or 0.0) + rise(had, report.input_tokens)
        if report.output_tokens is not None:
            had = None if before is None else before.output_tokens
            self._produced = rise(had, report.output_tokens)
            self.output_tokens = (self.output_tokens or 0.0) + self._produced

    def produced(self, running: int, now: float) -> tuple[float, float] | None:
        """The output of the time since the report before: tokens, and seconds added up over all that ran.

        `running`: how many run now, by the engine's word. None where nothing ran at either end of the time, or nothing
        was counted.
        """
        had, seconds = self._running, now - self._at
        self._running, self._at = running, now
        if not self._produced or not had or not running:
            return None
        return self._produced, seconds * (had + running) / 2


def rise(before: float | None, after: float) -> float:
    """By how much a counter rose; 0 for the first reading, and all of it where it began anew."""
    if before is None:
        return 0.0
    return after - before if after >= before else after
