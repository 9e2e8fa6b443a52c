"""What each client used of each model, day by day (UTC): the facts from which usage is billed.

A bill counts as a whole on the day on which it is settled, so what is counted for a past day is final. The core has no
clock of days: its owner says when one begins (`DayBegan`).

Memory is bounded. Days older than those to keep are dropped; their tokens stay in the sums of the ledger. Clients that
are `named`, as those of the clients file are, always have rows of their own. All others together have a limited number
of rows: beyond it, of the oldest day, the row that was used least recently is added to that of `OTHERS`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import sub
from typing import Final

from router.core.model.request import ClientId
from router.core.model.saved import DailyUsage, UsageRows, in_rows

OTHERS: Final = ClientId("other")
"""The client under which usage is kept that has lost its own row. No client has this name."""
KEPT_DAYS: Final = 62
"""Days of usage that are kept if nothing else is set."""
MOST_UNNAMED: Final = 20_000
"""Rows of clients that are not named, over all days."""
Key = tuple[ClientId, str]
"""A client and a model."""


class _Day:
    """The rows of one day."""

    def __init__(self) -> None:
        self.rows: dict[Key, DailyUsage] = {}
        self.unnamed: OrderedDict[Key, None] = OrderedDict()
        """The keys of clients that are not named, from the least to the most recently used."""
        self.pieces: tuple[UsageRows, ...] | None = None
        """The rows as they are saved; None if they have changed since."""

    def add(self, used: DailyUsage) -> bool:
        """Count usage. Returns whether its row is new."""
        key = used.client, used.model
        row = self.rows.get(key)
        self.rows[key] = used if row is None else _sum(row, used)
        self.pieces = None
        return row is None

    def take_back(self, used: DailyUsage, key: Key) -> None:
        """Subtract usage from a row, and drop that if nothing is left."""
        left = _difference(self.rows[key], used)
        self.pieces = None
        if any(left.counts):
            self.rows[key] = left
        else:
            del self.rows[key]
            self.unnamed.pop(key, None)

    def fold(self) -> None:
        """Add the row that was used least recently to that of `OTHERS`."""
        key, _ = self.unnamed.popitem(last=False)
        self.add(self.rows.pop(key)._replace(client=OTHERS))


class UsageDays:
    """Usage by day, client and model."""

    def __init__(
        self,
        keep: int = KEPT_DAYS,
        most_unnamed: int = MOST_UNNAMED,
        named: Callable[[ClientId], bool] = lambda _: False,
    ) -> None:
        """`keep`: how many days are kept, the present one included; `most_unnamed`: as `MOST_UNNAMED`."""
        self._keep = keep
        self._most_unnamed = most_unnamed
        self._named = named
        self._unnamed = 0
        """Rows of clients that are not named, over all days."""
        self._models: dict[str, None] = {}
        """All models that were used."""
        self._days: dict[int, _Day] = {}
        self.day = 0
        """The present day: days since 1970-01-01."""

    def begin_day(self, day: int) -> None:
        """Count on this day from now on, and drop days that are too old."""
        self.day = day
        for old in [each for each in self._days if each <= day - self._keep]:
            self._unnamed -= len(self._days.pop(old).unnamed)

    def add(self, used: DailyUsage) -> None:
        """Count usage on its day."""
        day = self._days.get(used.day)
        if day is None:
            day = self._days[used.day] = _Day()
        self._models[used.model] = None
        key = used.client, used.model
        if not day.add(used):
            if key in day.unnamed:
                day.unnamed.move_to_end(key)
            return
        if used.client == OTHERS or self._named(used.client):
            return
        day.unnamed[key] = None
        self._unnamed += 1
        if self._unnamed > self._most_unnamed:
            self._days[min(each for each, rows in self._days.items() if rows.unnamed)].fold()
            self._unnamed -= 1

    def take_back(self, used: DailyUsage) -> None:
        """Count usage no longer, as far as its row, or else that of `OTHERS`, still has it."""
        if (day := self._days.get(used.day)) is None:
            return
        for key in ((used.client, used.model), (OTHERS, used.model)):
            if key in day.rows:
                before = len(day.unnamed)
                day.take_back(used, key)
                self._unnamed += len(day.unnamed) - before
                return

    def days(self) -> Iterator[tuple[int, list[DailyUsage]]]:
        """Yield each day with its rows, in order, as they are when they are asked for."""
        for day in sorted(self._days):
            if day in self._days:
                yield day, list(self._days[day].rows.values())

    def rows_of(self, client: ClientId) -> list[DailyUsage]:
        """Return a client's rows, in order of days."""
        rows = [self._days[day].rows.get((client, model)) for day in sorted(self._days) for model in self._models]
        return [row for row in rows if row is not None]

    def saved(self, unsettled: Iterable[DailyUsage]) -> list[UsageRows]:
        """Return the rows of the state file. `unsettled`: what open bills charge so far, to be saved as if it was
        settled.
        """
        with_unsettled = dict(self._days)
        if unsettled := list(unsettled):
            today = with_unsettled[self.day] = _Day()
            for row in [*self._days.get(self.day, _Day()).rows.values(), *unsettled]:
                today.add(row)
        pieces: list[UsageRows] = []
        for number in sorted(with_unsettled):
            day = with_unsettled[number]
            if day.pieces is None:
                day.pieces = tuple(map(UsageRows, in_rows(day.rows.values())))
            pieces += day.pieces
        return pieces


def _sum(row: DailyUsage, used: DailyUsage) -> DailyUsage:
    """Return the sum, field by field, under the day, client and model of the row."""
    return DailyUsage(
        row.day,
        row.client,
        row.model,
        row.calls + used.calls,
        row.input_tokens + used.input_tokens,
        row.cached_tokens + used.cached_tokens,
        row.output_tokens + used.output_tokens,
        row.estimated_input + used.estimated_input,
        row.estimated_output + used.estimated_output,
    )


def _difference(row: DailyUsage, used: DailyUsage) -> DailyUsage:
    """Return the difference, field by field and not below 0, under the day, client and model of the row. A part of the
    input stays no larger than the input.
    """
    left = DailyUsage(*row[:3], *[max(0, count) for count in map(sub, row.counts, used.counts)])
    cached, estimated = min(left.cached_tokens, left.input_tokens), min(left.estimated_input, left.input_tokens)
    return left._replace(cached_tokens=cached, estimated_input=estimated)
