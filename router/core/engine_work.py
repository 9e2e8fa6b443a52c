"""What one worker computed by its own counters, beside what was charged for what it did."""

from collections import deque
from typing import Final

from router.core.accounts import NOTHING, Tokens
from router.core.model import WorkReport

UNCHARGED_SECONDS: Final = 30.0
"""How long input that nobody was charged for is looked for."""


class EngineWork:
    """Totals since the worker joined; they fall only where a charge was too high and is put right."""

    def __init__(self) -> None:
        self.charged = NOTHING
        """What clients were charged, as far as it is served."""
        self.input_tokens: float | None = None
        """Of prompts, computed by the engine's count since its first report; None where it does not count."""
        self.output_tokens: float | None = None
        self._told = False
        self._last_input: float | None = None
        self._last_output: float | None = None
        self._differences: deque[tuple[float, float]] = deque()
        """Of the latest reports: when, and by how much the input computed exceeded what was charged."""
        self._uncharged = 0
        """Input that was computed by the last of them, which nobody was charged for since, nor will be by itself."""
        self._produced = 0.0
        self._running = 0
        self._at = 0.0

    def charge(self, before: Tokens, after: Tokens) -> None:
        """A client's bill for what was served here changed."""
        had, has = before, after
        self.charged = self.charged.plus(
            Tokens(has.extend - had.extend, has.cached - had.cached, has.output - had.output)
        )

    def reported(self, report: WorkReport | None, unstarted: int = 0, now: float = 0.0) -> None:
        """Take in the engine's counters; those that fell began anew.

        `unstarted`: predicted extend tokens of the requests that are there and not started, which nobody has been
        charged yet.
        """
        self._produced = 0.0
        if report is None:
            return
        if report.input_tokens is not None:
            more = rise(self._before(self._last_input), report.input_tokens)
            self._last_input = report.input_tokens
            self.input_tokens = (self.input_tokens or 0.0) + more
            self._compare(self.input_tokens - self.charged.extend, unstarted, now)
        if report.output_tokens is not None:
            self._produced = rise(self._before(self._last_output), report.output_tokens)
            self._last_output = report.output_tokens
            self.output_tokens = (self.output_tokens or 0.0) + self._produced
        self._told = True

    def _before(self, last: float | None) -> float | None:
        # Some engines show a counter from its first increment on.
        return 0.0 if last is None and self._told else last

    def _compare(self, difference: float, unstarted: int, now: float) -> None:
        self._differences.append((now, difference))
        while len(self._differences) > 2 and self._differences[1][0] <= now - UNCHARGED_SECONDS:
            self._differences.popleft()
        # Engines count a prompt between its dispatch and its first token. So of the unstarted ones any part may be in
        # the latest count; what was unstarted at the first of these reports was charged since.
        self._uncharged = max(0, round(difference - self._differences[0][1]) - unstarted)

    def claim(self, tokens: int) -> int:
        """How many of these input tokens may have been computed without being charged; they are charged now.

        All of them where the engine does not count. Else no more than it computed in the last `UNCHARGED_SECONDS` by
        its own count beyond what was charged in the same time, as of its last report.
        """
        if not self._differences:
            return tokens
        claimed = min(tokens, self._uncharged)
        self._uncharged -= claimed
        return claimed

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
