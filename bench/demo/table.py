"""Format the demo's tables as lines of text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.demo.figures import HEAVY, Figures
from bench.demo.trial import Snapshot
from bench.report.columns import Row, aligned

PLAIN_ROUTER: Final = "rr+fcfs"
"""The policy with which the others are compared."""
FAIR_ROUTER: Final = "vtc"
"""The fair policy without locality."""

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


FIGURES: Final[Mapping[str, tuple[Callable[[Figures], float | None], int]]] = {
    "cost served, a second": (lambda seen: seen.cost_per_s, 0),
    "hit rate": (lambda seen: seen.hit_rate, 2),
    "heavy: requests answered": (lambda seen: seen.heavy.requests, 0),
    "heavy: TTFT p50, s": (lambda seen: seen.heavy.ttft_p50_s, 2),
    "heavy: TTFT p95, s": (lambda seen: seen.heavy.ttft_p95_s, 2),
    "light: requests answered": (lambda seen: seen.light.requests, 0),
    "light: TTFT p50, s": (lambda seen: seen.light.ttft_p50_s, 2),
    "light: TTFT p95, s": (lambda seen: seen.light.ttft_p95_s, 2),
    "light alone: TTFT p50, s": (lambda seen: seen.light_alone.ttft_p50_s, 2),
    "light alone: TTFT p95, s": (lambda seen: seen.light_alone.ttft_p95_s, 2),
    "time per output token, ms": (lambda seen: None if seen.token_s is None else 1000 * seen.token_s, 1),
    "Jain's index": (lambda seen: seen.jain, 2),
    "service gap": (lambda seen: seen.service_gap, 0),
    "its bound": (lambda seen: seen.service_gap_bound, 0),
}
"""The figures in the summary of a policy, each with its number of decimals."""


def summary_lines(results: Mapping[str, Figures]) -> list[str]:
    """Format the summary, one column per policy."""
    rows = [
        (name, *[_number(figure(seen), digits) for seen in results.values()])
        for name, (figure, digits) in FIGURES.items()
    ]
    return aligned([("", *results), *rows])


def findings(results: Mapping[str, Figures]) -> list[str]:
    """Return sentences that compare how long the light clients wait under each policy, and the cost served."""
    waits = [f"{_number(seen.light.ttft_p95_s)} s under {policy}" for policy, seen in results.items()]
    alone = [seen.light_alone.ttft_p95_s for seen in results.values() if seen.light_alone.ttft_p95_s is not None]
    plain, fair = results[PLAIN_ROUTER], results[FAIR_ROUTER]
    return [
        "Of a light client's requests beside the heavy one, 95 % have their first token within"
        f" {_listed(waits)}; alone, within {_number(max(alone, default=None))} s.",
        *[
            f"{policy}: {_share(seen.light.ttft_p95_s, plain.light.ttft_p95_s)} of that wait under {PLAIN_ROUTER}"
            f" and {_share(seen.light.ttft_p95_s, fair.light.ttft_p95_s)} of that under {FAIR_ROUTER},"
            f" at {_share(seen.cost_per_s, plain.cost_per_s)} of the cost that {PLAIN_ROUTER} serves."
            for policy, seen in results.items()
            if seen not in (plain, fair)
        ],
        *_warnings(results),
    ]


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
    return f"{', '.join(each[:-1])} and {each[-1]}"


def _share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{part / whole:.0%}"


def _number(value: float | None, digits: int = 2) -> str:
    """Format a value with `digits` decimals."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"
