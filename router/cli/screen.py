"""What `d2lpm top` shows: the clients and workers of one report of /fairness, drawn with rich."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.telemetry.report import ClientReport, FairnessReport, WorkerReport

T = TypeVar("T")
Rows = Sequence[tuple[str, T]]

UNKNOWN: Final = "-"
SUFFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
KEYS: Final = "tab clients/workers   up/down select   left/right order by   r reverse   enter details   q quit"
LINES_AROUND: Final = 9
"""Lines of the screen that are no rows of the two tables."""
PAGE: Final = 10
"""Rows by which page up and page down move."""


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table. `value` orders the rows; `text` is what a cell shows."""

    title: str
    value: Callable[[str, T], float | str]
    text: Callable[[str, T], str]


def compact(value: float | None) -> str:
    """Return a number with three digits or fewer, and a suffix: 12345 is 12.3k."""
    if value is None:
        return UNKNOWN
    for unit, suffix in SUFFIXES:
        if abs(value) >= unit * 0.9995:
            return f"{_digits(value / unit)}{suffix}"
    return f"{value:.0f}" if value == int(value) else _digits(value)


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.1f}%"


def seconds(value: float | None) -> str:
    """Return a duration in seconds."""
    return UNKNOWN if value is None else f"{value:.2f}s"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _order(client: ClientReport) -> float | None:
    """Return the client's smallest deficit in a queue; None if the policy keeps none."""
    deficits = [each.order for each in client.deficit.values() if each.order is not None]
    return min(deficits, default=None)


def _hit_rate(worker: WorkerReport) -> float | None:
    return worker.cache.actual / worker.cache.prompt if worker.cache is not None and worker.cache.prompt else None


def _state(worker: WorkerReport) -> str:
    if not worker.healthy:
        return "down"
    return "up" if worker.breaker in (None, "closed") else str(worker.breaker)


def _of(amount: int, limit: int | None) -> str:
    return f"{compact(amount)}/{compact(limit)}"


def _known(value: float | None) -> float:
    return float("-inf") if value is None else value


CLIENT_COLUMNS: Final[Sequence[Column[ClientReport]]] = (
    Column("client", lambda name, _: name, lambda name, _: name),
    Column("weight", lambda _, c: c.weight, lambda _, c: compact(c.weight)),
    Column("share", lambda _, c: _known(c.share), lambda _, c: percent(c.share)),
    Column("waiting", lambda _, c: c.queued, lambda _, c: compact(c.queued)),
    Column("running", lambda _, c: c.running, lambda _, c: compact(c.running)),
    Column("wait p50", lambda _, c: _known(c.wait_p50_s), lambda _, c: seconds(c.wait_p50_s)),
    Column("wait p95", lambda _, c: _known(c.wait_p95_s), lambda _, c: seconds(c.wait_p95_s)),
    Column("unserved", lambda _, c: _known(c.unserved_s), lambda _, c: seconds(c.unserved_s)),
    Column("lag", lambda _, c: c.service_lag, lambda _, c: compact(c.service_lag)),
    Column("deficit", lambda _, c: _known(_order(c)), lambda _, c: compact(_order(c))),
    Column("cost", lambda _, c: c.service.cost, lambda _, c: compact(c.service.cost)),
)
WORKER_COLUMNS: Final[Sequence[Column[WorkerReport]]] = (
    Column("worker", lambda name, _: name, lambda name, _: name),
    Column("health", lambda _, w: _state(w), lambda _, w: _state(w)),
    Column("running", lambda _, w: w.running, lambda _, w: _of(w.running, w.window.requests if w.window else None)),
    Column(
        "unstarted tokens",
        lambda _, w: w.unstarted_tokens,
        lambda _, w: _of(w.unstarted_tokens, w.window.unstarted_tokens if w.window else None),
    ),
    Column("waiting", lambda _, w: w.queued, lambda _, w: compact(w.queued)),
    Column(
        "cached",
        lambda _, w: w.cache.believed if w.cache else -1,
        lambda _, w: _of(w.cache.believed, w.cache.capacity) if w.cache else UNKNOWN,
    ),
    Column("hit rate", lambda _, w: _known(_hit_rate(w)), lambda _, w: percent(_hit_rate(w))),
    Column("gap", lambda _, w: _known(w.service_gap), lambda _, w: compact(w.service_gap)),
    Column("bound", lambda _, w: _known(w.service_gap_bound), lambda _, w: compact(w.service_gap_bound)),
)


class Pane(Generic[T]):
    """One of the two tables: the order of its rows, and the one that is selected."""

    def __init__(self, title: str, columns: Sequence[Column[T]], ordered_by: str) -> None:
        self.title: Final = title
        self._columns = columns
        self._ordered_by = [column.title for column in columns].index(ordered_by)
        self._descending = True
        self._rows: Rows[T] = ()
        self._selected: str | None = None
        """Name of the row selected, which it keeps when the order changes."""

    @property
    def selected(self) -> tuple[str, T] | None:
        """The row selected; None without rows."""
        return self._rows[self._position] if self._rows else None

    def show(self, rows: Mapping[str, T]) -> None:
        """Show these rows from now on."""
        self._sort([*rows.items()])

    def move(self, lines: int) -> None:
        """Select the row that is `lines` further down."""
        if self._rows:
            self._selected = self._rows[max(0, min(len(self._rows) - 1, self._position + lines))][0]

    def order_by(self, further: int) -> None:
        """Order by the column that is `further` to the right."""
        self._ordered_by = (self._ordered_by + further) % len(self._columns)
        self._sort(self._rows)

    def reverse(self) -> None:
        """Turn the order around."""
        self._descending = not self._descending
        self._sort(self._rows)

    def table(self, height: int | None = None, *, focused: bool = False) -> Table:
        """Return the table, with at most `height` rows around the one selected."""
        arrow = " ▼" if self._descending else " ▲"
        table = Table(box=None, expand=True, pad_edge=False, header_style="bold", title=self._heading(height))
        table.title_justify = "left"
        table.title_style = "bold reverse" if focused else "dim"
        for number, column in enumerate(self._columns):
            title = column.title + (arrow if number == self._ordered_by else "")
            table.add_column(title, justify="right" if number else "left", no_wrap=True, overflow="ellipsis")
        first = 0 if height is None else max(0, min(self._position - height // 2, len(self._rows) - height))
        for at, (name, row) in enumerate(self._rows[first : None if height is None else first + height], first):
            cells = [Text(column.text(name, row)) for column in self._columns]
            table.add_row(*cells, style="reverse" if focused and at == self._position else "")
        return table

    @property
    def _position(self) -> int:
        names = [name for name, _ in self._rows]
        return names.index(self._selected) if self._selected in names else 0

    def _heading(self, height: int | None) -> str:
        shown = len(self._rows) if height is None else min(height, len(self._rows))
        return f"{self.title}: {len(self._rows)}" + (f", {shown} shown" if shown < len(self._rows) else "")

    def _sort(self, rows: Rows[T]) -> None:
        value = self._columns[self._ordered_by].value
        by_name = sorted(rows, key=lambda row: row[0])
        self._rows = sorted(by_name, key=lambda row: value(*row), reverse=self._descending)


class Screen:
    """The whole screen, and what keys do to it."""

    def __init__(self, url: str) -> None:
        self.closed: Final = asyncio.Event()
        """Set once the user has left."""
        self.clients: Final = Pane("clients", CLIENT_COLUMNS, "share")
        self.workers: Final = Pane("workers", WORKER_COLUMNS, "running")
        self._url = url
        self._report: FairnessReport | None = None
        self._error = ""
        self._in_workers = False
        self._details = False

    def show(self, report: FairnessReport) -> None:
        """Show a report from now on."""
        self._report, self._error = report, ""
        self.clients.show({str(name): client for name, client in report.clients.items()})
        self.workers.show({str(name): worker for name, worker in report.workers.items()})

    def show_error(self, error: str) -> None:
        """Say why there is no new report. The last one stays."""
        self._error = error

    def press(self, key: str) -> None:
        """Handle a key."""
        pane = self.workers if self._in_workers else self.clients
        moves = {"up": -1, "down": 1, "page up": -PAGE, "page down": PAGE}
        if key == "q":
            self.closed.set()
        elif key == "tab":
            self._in_workers = not self._in_workers
        elif key == "enter":
            self._details = not self._details
        elif key == "escape":
            self._details = False
        elif key == "r":
            pane.reverse()
        elif key in ("left", "right"):
            pane.order_by(1 if key == "right" else -1)
        elif key in moves:
            pane.move(moves[key])

    def render(self, height: int | None) -> RenderableType:
        """Return what to draw in `height` lines; with None, everything."""
        if self._report is None:
            return Text(self._error or f"asking {self._url} ...")
        parts: list[RenderableType] = [self._summary(self._report), Text("")]
        if self._details:
            parts.append(self._selected_details(height))
        else:
            rows = None if height is None else max(2, height - LINES_AROUND)
            of_workers = None if rows is None else max(1, min(len(self._report.workers), rows // 3))
            of_clients = None if rows is None or of_workers is None else max(1, rows - of_workers)
            parts.append(self.clients.table(of_clients, focused=height is not None and not self._in_workers))
            parts.append(Text(""))
            parts.append(self.workers.table(of_workers, focused=height is not None and self._in_workers))
        if self._error:
            parts.append(Text(self._error, style="bold red"))
        elif height is not None:
            parts.append(Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _summary(self, report: FairnessReport) -> Text:
        clients, workers = report.clients.values(), report.workers.values()
        figures = {
            "policy": report.policy,
            "Jain's index": UNKNOWN if report.jain is None else f"{report.jain:.3f}",
            "waiting": compact(sum(client.queued for client in clients)),
            "running": compact(sum(client.running for client in clients)),
            "largest lag": compact(report.service_lag),
            "workers up": f"{sum(worker.healthy for worker in workers)}/{len(workers)}",
        }
        text = Text("d2lpm ", style="bold", no_wrap=True, overflow="ellipsis")
        text.append(self._url, style="not bold")
        for name, value in figures.items():
            text.append(f"   {name} ", style="not bold dim").append(value)
        return text

    def _selected_details(self, height: int | None) -> RenderableType:
        selected = self.workers.selected if self._in_workers else self.clients.selected
        if selected is None:
            return Text("There is none.")
        name, row = selected
        fields = [*_flat("", dataclasses.asdict(row))]
        lines = len(fields) if height is None else max(1, height - LINES_AROUND)
        table = Table(box=None, pad_edge=False, show_header=False, title_justify="left", title_style="bold")
        table.title = Text(name)  # a name alone would be read as markup
        for line in range(min(lines, len(fields))):
            cells = [(Text(field, style="dim"), Text(value)) for field, value in fields[line::lines]]
            table.add_row(*(cell for pair in cells for cell in pair))
        return table


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield every value with the path of names to it, as /fairness has them."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{path} ", value)
        else:
            yield path, UNKNOWN if value is None else str(value)


def print_frame(report: FairnessReport, url: str, width: int | None) -> None:
    """Print a whole report, `width` columns wide; None: as wide as the terminal."""
    screen = Screen(url)
    screen.show(report)
    Console(width=width, highlight=False).print(screen.render(None))


@contextmanager
def painting(screen: Screen) -> Iterator[Callable[[], None]]:
    """Take the terminal, and give it back on exit. Yields what paints the screen."""
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda: live.update(screen.render(console.height), refresh=True)
