"""Format the demo's tables as lines of text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final

from bench.demo.figures import HEAVY, Figures
from bench.demo.trial import Snapshot
from bench.report.columns import Row, aligned

FAIR: Final = ("d2lpm", "dlpm_home", "vtc")
PLAIN: Final = "rr+fcfs"
"""The policy with which the fair ones are compared."""
LOCAL: Final = ("d2lpm", "dlpm_home")
BLIND: Final = ("vtc", "rr+fcfs")
"""The policies that do not look at the caches."""
CHARTED: Final = ("light: TTFT p95, s", "heavy: requests answered")
BAR: Final = 50
"""Characters in the longest bar of a chart."""

UNKNOWN: Final = "-"
"""Printed in place of a missing figure."""
HEAD: Final = (
    *("", "", "in flight", "cost/s", "hit rate", "light alone p50", "p95"),
    *("light p50", "p95", "heavy p50", "p95", "Jain"),
)
CLIENT_HEAD: Final = ("client", "in flight", "answered", "cost/s", "TTFT p50", "p95")

TOO_BUSY: Final = 1.05
"""If a token takes this many times as long as under another policy, the demo prints a warning."""


def policy_row(policy: str, snapshot: Snapshot | None) -> Row:
    """Return the row of a policy under `HEAD`; empty cells if `snapshot` is None, before its run."""
    if snapshot is None:
        return (policy, *[""] * (len(HEAD) - 1))
    seen, heavy = snapshot.figures, snapshot.in_flight[HEAVY]
    waits = [
        _number(wait)
        for group in (seen.light_alone, seen.light, seen.heavy)
        for wait in (group.ttft_p50_s, group.ttft_p95_s)
    ]
    return (
        *(policy, snapshot.phase, f"{heavy} + {sum(snapshot.in_flight.values()) - heavy}"),
        *(_number(seen.cost_per_s, 0), _number(seen.hit_rate), *waits, _number(seen.jain)),
    )


def client_rows(snapshot: Snapshot) -> Sequence[Row]:
    """Return the row of each client under `CLIENT_HEAD`."""
    return [
        (
            *(client, str(snapshot.in_flight[client]), str(group.requests)),
            _number(group.cost / snapshot.figures.seconds if snapshot.figures.seconds else None, 0),
            *(_number(group.ttft_p50_s), _number(group.ttft_p95_s)),
        )
        for client, group in snapshot.clients.items()
    ]


def policy_lines(snapshots: Mapping[str, Snapshot | None]) -> list[str]:
    """Format the table of all policies."""
    return aligned([HEAD, *(policy_row(policy, snapshot) for policy, snapshot in snapshots.items())])


def client_lines(snapshot: Snapshot) -> list[str]:
    """Format the table of the clients under one policy."""
    return aligned([CLIENT_HEAD, *client_rows(snapshot)])


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A row of the summary."""

    figure: Callable[[Figures], float | None]
    digits: int
    """Number of decimals."""
    about: str
    """What it says, in plain words."""


ROWS: Final[Mapping[str, SummaryRow]] = {
    "light: TTFT p50, s": SummaryRow(
        lambda seen: seen.light.ttft_p50_s,
        2,
        "TTFT is the time from sending a request to the first token of its answer, in seconds of the emulated GPUs."
        " Half of the light clients' requests waited at most this long.",
    ),
    "light: TTFT p95, s": SummaryRow(
        lambda seen: seen.light.ttft_p95_s, 2, "95 % of the light clients' requests waited at most this long."
    ),
    "light alone: TTFT p95, s": SummaryRow(
        lambda seen: seen.light_alone.ttft_p95_s, 2, "The same before the heavy client came."
    ),
    "light: requests answered": SummaryRow(
        lambda seen: seen.light.requests, 0, "Requests of the light clients that ended in the measured time."
    ),
    "heavy: TTFT p95, s": SummaryRow(
        lambda seen: seen.heavy.ttft_p95_s, 2, "As above, of the heavy client: it gets what the light ones leave."
    ),
    "heavy: requests answered": SummaryRow(
        lambda seen: seen.heavy.requests, 0, "Its requests that ended in the measured time: the throughput."
    ),
    "hit rate": SummaryRow(
        lambda seen: seen.hit_rate, 2, "Part of the input tokens that a worker had cached and did not compute again."
    ),
    "cost served, a second": SummaryRow(
        lambda seen: seen.cost_per_s, 0, "Input tokens that were computed, and twice the output tokens."
    ),
    "Jain's index": SummaryRow(
        lambda seen: seen.jain,
        2,
        "1 if all five clients got the same service, 0.2 if one got all. The light ones ask for less than a fifth.",
    ),
    "service gap": SummaryRow(
        lambda seen: seen.service_gap, 0, "Largest difference of service between two clients that both waited."
    ),
    "its bound": SummaryRow(
        lambda seen: seen.service_gap_bound, 0, "What DLPM's theorem allows; the other policies have none."
    ),
}
"""The figures in the summary of a policy."""
COLUMNS: Final[Mapping[str, str]] = {
    "d2lpm": "turns by the service that each client had, at the worker whose cache holds the prefix (D²LPM).",
    "dlpm_home": "the default: the same turns over one queue; each prefix has a home worker.",
    "vtc": "turns by service, but blind to the caches.",
    "rr+fcfs": "a plain router: workers in turn, first come, first served.",
}
"""The policies of the summary in plain words."""


def summary_lines(results: Mapping[str, Figures]) -> list[str]:
    """Format the summary, one column per policy."""
    rows = [(name, *[_number(row.figure(seen), row.digits) for seen in results.values()]) for name, row in ROWS.items()]
    return aligned([("", *results), *rows])


def explanation(width: int) -> list[str]:
    """Say what each column and each row of the summary means, in lines of this width."""
    terms = {**COLUMNS, **{name: row.about for name, row in ROWS.items()}}
    return [line for name, about in terms.items() for line in wrap(f"{name}: {about}", width, subsequent_indent="    ")]


def charts(results: Mapping[str, Figures]) -> list[str]:
    """Draw the two figures in which the policies differ most as bars."""
    lines: list[str] = []
    for name in CHARTED:
        lines += ["", name] if lines else [name]
        values = {policy: ROWS[name].figure(seen) or 0.0 for policy, seen in results.items()}
        longest = max(values.values())
        for policy, value in values.items():
            bar = "█" * round(BAR * value / longest) if longest else ""
            lines.append(f"  {policy.ljust(max(map(len, values)))} {bar} {_number(value, ROWS[name].digits)}")
    return lines


def findings(results: Mapping[str, Figures]) -> list[str]:
    """Return what this run shows of the two claims of the router, or that it does not show them."""
    return [_fairness(results), _locality(results), *_warnings(results)]


def _fairness(results: Mapping[str, Figures]) -> str:
    """Compare how long light clients wait under fair policies and under the plain one."""
    waits = {policy: results[policy].light.ttft_p95_s for policy in (*FAIR, PLAIN)}
    said = (
        f"95 % of the light clients' requests had their first token within {_each(waits, FAIR, 2)} s under"
        f" {_listed(FAIR)}, and within {_each(waits, (PLAIN,), 2)} s under {PLAIN}"
    )
    longest, plain = _extreme(max, waits, FAIR), waits[PLAIN]
    if longest is None or plain is None or longest >= plain:
        return f"This run does not show that the fair policies shorten the wait of light clients: {said}."
    return f"Fair: {said}, {plain / longest:.1f} times as long or more." if longest else f"Fair: {said}."


def _locality(results: Mapping[str, Figures]) -> str:
    """Compare hit rate and throughput of the policies that follow the caches and of those that do not."""
    hits = {policy: seen.hit_rate for policy, seen in results.items()}
    answered = {policy: float(seen.heavy.requests) for policy, seen in results.items()}
    said = (
        f"{_listed(LOCAL)} found {_each(hits, LOCAL, 2)} of the input in the caches, {_listed(BLIND)}"
        f" {_each(hits, BLIND, 2)}; the same workers answered {_each(answered, LOCAL, 0)} requests of the heavy client"
        f" instead of {_each(answered, BLIND, 0)}"
    )
    shown = True
    for values in (hits, answered):
        least, most = _extreme(min, values, LOCAL), _extreme(max, values, BLIND)
        shown = shown and least is not None and most is not None and least > most
    return f"Local: {said}." if shown else f"This run does not show that following the caches pays: {said}."


def _extreme(
    choose: Callable[[Iterable[float]], float], values: Mapping[str, float | None], policies: Iterable[str]
) -> float | None:
    """Return the least or the largest value of these policies; None if one is missing."""
    found = [values[policy] for policy in policies]
    known = [value for value in found if value is not None]
    return choose(known) if len(known) == len(found) else None


def _each(values: Mapping[str, float | None], policies: Iterable[str], digits: int) -> str:
    return _listed([_number(values[policy], digits) for policy in policies])


def _warnings(results: Mapping[str, Figures]) -> list[str]:
    """Return a warning if this machine was too busy to emulate the workers at the same pace."""
    paces = {policy: seen.token_s for policy, seen in results.items() if seen.token_s is not None}
    if not paces:
        return []
    slow, quick = max(paces, key=paces.__getitem__), min(paces, key=paces.__getitem__)
    if paces[slow] <= TOO_BUSY * paces[quick]:
        return []
    return [
        "But this machine was busy with other things, and the emulated workers were late: under"
        f" {slow} they took {paces[slow] / paces[quick] - 1:.0%} longer for a token than under {quick}."
    ]


def _listed(each: Sequence[str]) -> str:
    return " and ".join([", ".join(each[:-1]), each[-1]]) if len(each) > 1 else each[0]


def _number(value: float | None, digits: int = 2) -> str:
    """Format a value with `digits` decimals."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"
