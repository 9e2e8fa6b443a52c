"""What one worker computed by its own counters, compared with what clients were charged for its work."""

from collections import deque
from typing import Final

from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import WorkReport

UNCHARGED_SECONDS: Final = 30.0
"""How long uncharged tokens can be claimed."""


class Uncharged:
    """Tokens of one kind that an engine computed recently, by its own count, and that no client was charged for."""

    def __init__(self) -> None:
        self._differences: deque[tuple[float, float]] = deque()
        """Of recent reports: the time, and computed minus charged tokens."""
        self._tokens = 0

    def on_report(self, computed: float, charged: int, pending: int, now: float) -> None:
        """Record totals. `pending`: how many of the possibly computed tokens will be charged anyway."""
        difference = computed - charged
        self._differences.append((now, difference))
        while len(self._differences) > 2 and self._differences[1][0] <= now - UNCHARGED_SECONDS:
            self._differences.popleft()
        self._tokens = round(difference - self._differences[0][1]) - pending

    def recent_tokens(self, *, unknown: int) -> int:
        """Return the uncharged tokens of the last `UNCHARGED_SECONDS`, as of the last report; `unknown` before the
        first.

        Negative if more was charged than computed.
        """
        return self._tokens if self._differences else unknown

    def claim(self, tokens: int) -> None:
        """Count uncharged tokens as charged; negative to give them back."""
        self._tokens -= tokens


class EngineWork:
    """The engine's totals since the worker joined."""

    def __init__(self) -> None:
        self.input_tokens: float | None = None
        """Prompt tokens computed since the engine's first report, by its count; None if the engine does not count."""
        self.output_tokens: float | None = None
        self._reported_before = False
        self._last_input: float | None = None
        self._last_output: float | None = None
        self._input, self._output = Uncharged(), Uncharged()
        self._alone = True
        """Whether, at the last report, the engine ran nothing but this router's requests."""
        self._produced = 0.0
        self._running = 0
        self._at = 0.0

    def on_report(
        self,
        report: WorkReport | None,
        charged: Tokens = NOTHING,
        unstarted: int = 0,
        now: float = 0.0,
        *,
        alone: bool = True,
    ) -> None:
        """Record the engine's counters. Counters that decreased were reset.

        `charged`: served tokens that clients were charged for since the worker joined; `unstarted`: predicted extend
        tokens of requests in flight that have not started, which are not charged yet.
        `alone`: whether the engine runs nothing but this router's requests.
        """
        self._alone = alone
        self._produced = 0.0
        if report is None:
            return
        if report.input_tokens is not None:
            more = rise(self._before(self._last_input), report.input_tokens)
            self._last_input = report.input_tokens
            self.input_tokens = (self.input_tokens or 0.0) + more
            # Engines count a prompt at some time between its dispatch and its first token, so the count may include any
            # part of the unstarted requests.
            self._input.on_report(self.input_tokens, charged.extend, unstarted, now)
        if report.output_tokens is not None:
            self._produced = rise(self._before(self._last_output), report.output_tokens)
            self._last_output = report.output_tokens
            self.output_tokens = (self.output_tokens or 0.0) + self._produced
            self._output.on_report(self.output_tokens, charged.output, 0, now)
        self._reported_before = True

    def _before(self, last: float | None) -> float | None:
        # Some engines export a counter only after its first increment.
        return 0.0 if last is None and self._reported_before else last

    def claim_input(self, tokens: int) -> int:
        """Charge and return those of these input tokens that may have been computed without being charged.

        All of them if the engine does not count; else no more than the engine computed recently by its own count
        without a charge.
        """
        claimed = max(0, min(tokens, self._input.recent_tokens(unknown=tokens)))
        self._input.claim(claimed)
        return claimed

    def claim_output(self, estimated: int, of_all: int) -> int:
        """Charge and return the output tokens beyond the estimate of an answer of which nothing was seen.

        The answer gets its share of the recently computed and uncharged tokens, at most as many as were `estimated`. If
        more was charged than computed, the result is negative, and at least half of the estimate remains. `of_all`: the
        output estimated of all such answers running there. The result is 0 if the engine does not count, or also counts
        other routers' requests.
        """
        if not self._alone or not estimated:
            return 0
        claimed = self._output.recent_tokens(unknown=0) * estimated // of_all
        claimed = max(-estimated // 2, min(estimated, claimed))
        self._output.claim(claimed)
        return claimed

    def output_since_report(self, running: int, now: float) -> tuple[float, float] | None:
        """Return the output tokens since the previous report, and that time summed over the requests that ran.

        `running`: how many run now, as the engine reports. None if nothing ran at the beginning or the end of that
        time, or nothing was counted.
        """
        had, seconds = self._running, now - self._at
        self._running, self._at = running, now
        if not self._produced or not had or not running:
            return None
        return self._produced, seconds * (had + running) / 2


def rise(before: float | None, after: float) -> float:
    """Return the increase of a counter; 0 for the first reading, and the full value after a reset."""
    if before is None:
        return 0.0
    return after - before if after >= before else after
