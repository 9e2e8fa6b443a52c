"""The demo's tables, as lines of text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.demo.figures import HEAVY, Figures
from bench.demo.trial import Glance
from bench.report.columns import Row, aligned

PLAIN_ROUTER: Final = "rr+fcfs"
"""The policy that the others are held against."""
FAIR_ROUTER: Final = "vtc"
"""The fair policy that knows no locality."""

UNKNOWN: Final = "-"
"""Instead of a figure that there is not."""
HEAD: Final = (
    *("", "", "in flight", "cost/s", "hit rate", "light alone p50", "p95"),
    *("light p50", "p95", "heavy p50", "p95", "Jain"),
)
CLIENT_HEAD: Final = ("client", "in flight", "answered", "cost/s", "TTFT p50", "p95")

TOO_BUSY: Final = 1.05
"""How many times as long as under another policy a token may take before the figures are called into question."""


def policy_row(policy: str, glance: Glance | None) -> Row:
    """How a policy does, under `HEAD`; None before its turn."""
    if glance is None:
        return (policy, *[""] * (len(HEAD) - 1))
    seen, heavy = glance.figures, glance.in_flight[HEAVY]
    waits = [
        _number(wait)
        for group in (seen.light_alone, seen.light, seen.heavy)
        for wait in (group.ttft_p50_s, group.ttft_p95_s)
    ]
    return (
        *(policy, glance.phase, f"{heavy} + {sum(glance.in_flight.values()) - heavy}"),
        *(_number(seen.cost_per_s, 0), _number(seen.hit_rate), *waits, _number(seen.jain)),
    )


def client_rows(glance: Glance) -> Sequence[Row]:
    """How each client does, under `CLIENT_HEAD`."""
    return [
        (
            *(client, str(glance.in_flight[client]), str(group.requests)),
            _number(group.cost / glance.figures.seconds if glance.figures.seconds else None, 0),
            *(_number(group.ttft_p50_s), _number(group.ttft_p95_s)),
        )
        for client, group in glance.clients.items()
    ]


def policy_lines(glances: Mapping[str, Glance | None]) -> list[str]:
    """All policies, under their head."""
    return aligned([HEAD, *(policy_row(policy, glance) for policy, glance in glances.items())])


def client_lines(glance: Glance) -> list[str]:
    """The clients of one policy, under their head."""
    return aligned([CLIENT_HEAD, *client_rows(glance)])


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
"""What the summary has of a policy, with the digits behind the point."""


def summary_lines(results: Mapping[str, Figures]) -> list[str]:
    """The policies side by side."""
    rows = [
        (name, *[_number(figure(seen), digits) for seen in results.values()])
        for name, (figure, digits) in FIGURES.items()
    ]
    return aligned([("", *results), *rows])


def findings(results: Mapping[str, Figures]) -> list[str]:
    """What the figures say of who waits for whom, and at what price; a sentence each."""
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
        *_doubts(results),
    ]


def _doubts(results: Mapping[str, Figures]) -> list[str]:
    """Whether the machine was equal to what it had to emulate."""
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
    """So many digits behind the point."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"
