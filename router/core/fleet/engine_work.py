"""What one worker computed by its own counters, beside what was charged for what it did."""

from collections import deque
from typing import Final

from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import WorkReport

UNCHARGED_SECONDS: Final = 30.0
"""How long it is looked for what nobody was charged for."""


class Uncharged:
    """Tokens of one kind that an engine computed of late, by its own count, and that nobody was charged for."""

    def __init__(self) -> None:
        self._differences: deque[tuple[float, float]] = deque()
        """Of the latest reports: when, and by how much what was computed exceeded what was charged."""
        self._tokens = 0

    def on_report(self, computed: float, charged: int, pending: int, now: float) -> None:
        """Take in totals. `pending`: how much of what may have been computed will be charged by itself."""
        difference = computed - charged
        self._differences.append((now, difference))
        while len(self._differences) > 2 and self._differences[1][0] <= now - UNCHARGED_SECONDS:
            self._differences.popleft()
        self._tokens = round(difference - self._differences[0][1]) - pending

    def tokens(self, *, unknown: int) -> int:
        """How many there were in the last `UNCHARGED_SECONDS`, as of the last report; `unknown` without any.

        Negative where more was charged than computed.
        """
        return self._tokens if self._differences else unknown

    def claim(self, tokens: int) -> None:
        """So many of them are charged now; or given back, if negative."""
        self._tokens -= tokens


class EngineWork:
    """Totals since the worker joined; they fall only where a charge was too high and is put right."""

    def __init__(self) -> None:
        self.charged = NOTHING
        """What clients were charged, as far as it is served."""
        self.input_tokens: float | None = None
        """Of prompts, computed by the engine's count since its first report; None where it does not count."""
        self.output_tokens: float | None = None
        self._reported_before = False
        self._last_input: float | None = None
        self._last_output: float | None = None
        self._input, self._output = Uncharged(), Uncharged()
        self._alone = True
        """Whether, at the last report, nothing ran that this router did not send."""
        self._produced = 0.0
        self._running = 0
        self._at = 0.0

    def charge(self, before: Tokens, after: Tokens) -> None:
        """A client's bill for what was served here changed."""
        had, has = before, after
        self.charged = self.charged.plus(
            Tokens(has.extend - had.extend, has.cached - had.cached, has.output - had.output)
        )

    def on_report(self, report: WorkReport | None, unstarted: int = 0, now: float = 0.0, *, alone: bool = True) -> None:
        """Take in the engine's counters; those that fell began anew.

        `unstarted`: predicted extend tokens of the requests that are there and not started, which nobody has been
        charged yet. `alone`: whether nothing runs there that this router did not send.
        """
        self._alone = alone
        self._produced = 0.0
        if report is None:
            return
        if report.input_tokens is not None:
            more = rise(self._before(self._last_input), report.input_tokens)
            self._last_input = report.input_tokens
            self.input_tokens = (self.input_tokens or 0.0) + more
            # Engines count a prompt between its dispatch and its first token, so that any part of the unstarted ones
            # may be in the count.
            self._input.on_report(self.input_tokens, self.charged.extend, unstarted, now)
        if report.output_tokens is not None:
            self._produced = rise(self._before(self._last_output), report.output_tokens)
            self._last_output = report.output_tokens
            self.output_tokens = (self.output_tokens or 0.0) + self._produced
            self._output.on_report(self.output_tokens, self.charged.output, 0, now)
        self._reported_before = True

    def _before(self, last: float | None) -> float | None:
        # Some engines show a counter from its first increment on.
        return 0.0 if last is None and self._reported_before else last

    def claim_input(self, tokens: int) -> int:
        """How many of these input tokens may have been computed without being charged; they are charged now.

        All of them where the engine does not count. Else no more than it computed of late by its own count and nobody
        was charged for.
        """
        claimed = max(0, min(tokens, self._input.tokens(unknown=tokens)))
        self._input.claim(claimed)
        return claimed

    def claim_output(self, estimated: int, of_all: int) -> int:
        """How many output tokens an answer of which nothing was seen has beyond so many estimated; charged now.

        It has its part of what the engine computed of late and nobody was charged for, at most as many as were
        estimated; or of what was charged for more, and then it is negative, and at least half of them remain.
        `of_all`: the output estimated of all such answers that run there. 0 where the engine does not count, or counts
        what others sent it, too.
        """
        if not self._alone or not estimated:
            return 0
        claimed = self._output.tokens(unknown=0) * estimated // of_all
        claimed = max(-estimated // 2, min(estimated, claimed))
        self._output.claim(claimed)
        return claimed

    def output_since_report(self, running: int, now: float) -> tuple[float, float] | None:
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
