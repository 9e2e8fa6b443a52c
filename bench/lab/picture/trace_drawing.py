"""A trace as text: a line per span, with its times, a bar, and what it says of the decision or the attempt."""

from collections.abc import Sequence
from typing import Final

from bench.lab.picture.received_spans import ReceivedSpan

WIDTH: Final = 32
"""Characters of the whole call."""
HEAD: Final = f"{'span':<22}{'from ms':>9}{'for ms':>9}"
FULL: Final = "━"
SHORT: Final = "╸"
"""A span that is shorter than one character."""


def drawing(trace: Sequence[ReceivedSpan]) -> str:
    """Return the lines of a trace, whose first span is that of the call. Workers are numbered as they appear."""
    call = trace[0]
    workers: dict[str, int] = {}
    lines = [HEAD]
    for span in trace:
        since, lasted = (span.times[0] - call.times[0]) / 1e6, (span.times[1] - span.times[0]) / 1e6
        name = span.name.removeprefix("POST ") if span is call else f"  {span.name}"
        times = f"{name:<22}{since:>9.2f}{lasted:>9.2f}"
        lines.append(f"{times}  {_bar(span, call):<{WIDTH}}  {_what(span, workers)}".rstrip())
    return "\n".join(lines)


def _bar(span: ReceivedSpan, call: ReceivedSpan) -> str:
    whole = call.times[1] - call.times[0]
    first, last = (round((time - call.times[0]) * WIDTH / whole) for time in span.times)
    first = min(first, WIDTH - 1)
    return " " * first + (FULL * (last - first) or SHORT)


def _what(span: ReceivedSpan, workers: dict[str, int]) -> str:
    own = span.own
    if "tries" in own:
        return f"{own['outcome']}, {own['tries']} attempts"
    if "worker" not in own:
        return ""
    worker = f"worker {workers.setdefault(own['worker'], len(workers) + 1)}"
    if "why" in own:
        return f"{worker}: {own['why']}, match {own['match_tokens']} of {own['longest_match_tokens']}"
    if span.failed:
        return f"{worker}: {own['outcome']} ({span.attributes['error.type']})"
    usage = [span.attributes.get(f"gen_ai.usage.{kind}") for kind in ("input_tokens", "output_tokens")]
    return f"{worker}: {own['outcome']}, {usage[0]} input and {usage[1]} output tokens"
