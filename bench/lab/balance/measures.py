"""What is measured of a decode tier: how unevenly its ranks are loaded, what it serves, and who waits how long."""

from collections.abc import Mapping, Sequence
from typing import Final

from bench.lab.balance.contenders import REFERENCE
from bench.lab.frame.experiment import Row, Value
from bench.report.meters import censored_percentile
from bench.report.records import Record, Result
from bench.report.summary import Summary

DECIMALS: Final[Mapping[str, int]] = {
    "imbalance": 0,
    "sum imbalance": 0,
    "idle": 3,
    "attention": 3,
    "tok/s": 0,
    "tok/s in backlog": 0,
    "drain": 3,
    "TPOT p95 ms": 1,
    "TTFT p50": 1,
    "TTFT p95": 1,
    "TTFT max": 1,
    "longest wait": 1,
    "Jain": 3,
}
"""The figures in their order, with their decimals.

`imbalance` is the mean over the steps of max L - min L, `sum imbalance` that of the sum of max L - L, both in tokens;
`idle` the share of the ranks' attention time in which they wait, `attention` the share of a step that depends on L.
`tok/s` counts the whole run, `tok/s in backlog` the time after the warm-up in which calls arrive. `drain` is the share
of the whole run after the last call was dispatched: then nothing waits, so there is nothing to balance with. Times are
seconds, of the whole run.
"""
MEANING: Final = (
    "Imbalance: mean over steps of max L - min L in tokens of context; sum imbalance: of the sum of max L - L. Idle:"
    " share of the ranks' attention time in which they wait for the fullest; attention: share of a step that depends on"
    " L. tok/s: output of the whole run, its end included; in backlog: while calls arrive, after the warm-up. Drain:"
    " share of the run after the last dispatch. Seconds."
)


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Return the figures of a run."""
    (group,), whole = summary["groups"].values(), summary["whole_run"]
    return {
        "imbalance": group["imbalance_tokens"],
        "sum imbalance": group["imbalance_sum_tokens"],
        "idle": group["idle_share"],
        "attention": group["attention_share"],
        "tok/s": whole["output_tokens_per_s"],
        "tok/s in backlog": summary["output_tokens_per_s"],
        "drain": _drain(result.records),
        "TPOT p95 ms": _token_time(result.records),
        "TTFT p50": whole["ttft_p50_s"],
        "TTFT p95": whole["ttft_p95_s"],
        "TTFT max": whole["ttft_max_s"],
        "longest wait": whole["longest_wait_s"],
        "Jain": summary["jain"],
    }


def _drain(records: Sequence[Record]) -> float | None:
    """Return the share of a run after its last dispatch; None if nothing ended."""
    end = max([record.finished for record in records if record.finished is not None], default=0.0)
    last = max([record.dispatched for record in records if record.dispatched is not None], default=0.0)
    return (end - last) / end if end else None


def _token_time(records: Sequence[Record]) -> float | None:
    """Return the 95th percentile of a call's mean milliseconds per output token after the first."""
    spans = [
        (1000 * (record.finished - record.started) / (record.output_tokens - 1), True)
        for record in records
        if record.started is not None and record.finished is not None and record.output_tokens > 1
    ]
    return censored_percentile(spans, 0.95)


def compared(rows: Sequence[Row], by: str, reference: str = REFERENCE) -> Sequence[str]:
    """Return a table of each policy over the reference, among the rows with the same label `by`."""
    lines = [
        f"Over {reference}, medians over the seeds:",
        "",
        f"| {by} | policy | imbalance | tok/s | tok/s in backlog | longest wait |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        base = next(
            (each for each in rows if each.labels[by] == row.labels[by] and each.labels["policy"] == reference), None
        )
        if base is not None:
            cells = [
                _ratio(row, base, "imbalance", "{:.2f}"),
                *(_ratio(row, base, name, "{:+.1%}", less=1.0) for name in ("tok/s", "tok/s in backlog")),
                _ratio(row, base, "longest wait", "{:.2f}"),
            ]
            lines.append(f"| {row.labels[by]} | {row.labels['policy']} | {' | '.join(cells)} |")
    return lines


def _ratio(row: Row, base: Row, figure: str, form: str, less: float = 0.0) -> str:
    """Return the median over the seeds of this figure over the base's with the same seed."""
    pairs = zip(row.values[figure], base.values[figure], strict=True)
    ratios = [
        value / other - less
        for value, other in pairs
        if isinstance(value, float | int) and isinstance(other, float | int) and other
    ]
    return form.format(sorted(ratios)[(len(ratios) - 1) // 2]) if ratios else "-"
