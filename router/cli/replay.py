"""A recorded run, fed to a new scheduler, which must give the same commands: `d2lpm replay`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from pydantic import ValidationError

from router.config.settings import Settings
from router.core.model.commands import Command
from router.core.model.events import Arrived
from router.core.scheduler import Scheduler
from router.core.snapshot import restore
from router.errors import ConfigError
from router.persistence.journal import JournalEntry, JournalHeader, TornLine, read
from router.process.single import new_scheduler


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry at which other commands came than were recorded."""

    line: int
    entry: JournalEntry
    actual: Sequence[Command]

    def __str__(self) -> str:
        """The first command that differs, for people."""
        pairs = zip_longest(self.entry.commands, self.actual)
        expected, came = next(pair for pair in pairs if pair[0] != pair[1])
        return (
            f"line {self.line}: {type(self.entry.event).__name__} at {self.entry.at}\n"
            f"  expected: {expected or 'no command'}\n"
            f"  came:     {came or 'no command'}"
        )


@dataclass(slots=True)
class ReplayResult:
    """What was replayed: all, or up to the first difference."""

    runs: int = 0
    events: int = 0
    requests: int = 0
    """Arrivals; one that failed and was sent to another worker arrived once."""
    seconds: float = 0.0
    """From the start of each run to its last event, added up."""
    torn: int = 0
    """Lines that were cut short, and left out."""
    difference: Difference | None = None
    scheduler: Scheduler | None = None
    """That of the last run, as its last event left it."""

    def __str__(self) -> str:
        """One line for people."""
        torn = f"; {self.torn} cut short at the end of a run and left out" if self.torn else ""
        differences = 0 if self.difference is None else 1
        return (
            f"runs {self.runs}, events {self.events}, requests {self.requests}, seconds {self.seconds:.1f}, "
            f"differences {differences}{torn}"
        )


def replay(lines: Iterable[bytes]) -> ReplayResult:
    """Feed each run of a journal to a scheduler of its own, until a command differs from what was recorded.

    Raises ConfigError for what is not a journal, or not one that this router can replay.
    """
    told = ReplayResult()
    now = 0.0
    for number, item in enumerate(read(lines), 1):
        match item:
            case JournalHeader():
                told.scheduler = _scheduler_of(item)
                _restore(told.scheduler, item)
                now = item.clock
                told.runs += 1
            case TornLine():
                told.torn += 1
            case JournalEntry(at, event, commands):
                assert told.scheduler is not None, "a run begins with its header"
                told.events += 1
                told.requests += isinstance(event, Arrived)
                told.seconds += at - now
                now = at
                came = told.scheduler.handle(event, at)
                if came != commands:
                    told.difference = Difference(number, item, came)
                    break
    return told


def replay_file(path: Path) -> ReplayResult:
    """Replay a journal. Raises ConfigError, which names the file."""
    try:
        with path.open("rb") as lines:
            return replay(lines)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _restore(scheduler: Scheduler, header: JournalHeader) -> None:
    try:
        restore(scheduler, header.restored, header.clock)
    except ValueError as error:
        raise ConfigError(f"a header with a state that cannot be restored: {error}") from None


def _scheduler_of(header: JournalHeader) -> Scheduler:
    try:
        return new_scheduler(Settings.model_validate(header.settings))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"written by version {header.router}, with settings unknown here: {name}") from None
