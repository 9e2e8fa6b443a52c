"""The command `d2lpm replay`: feeds a recorded run to a new scheduler and compares the commands."""

import argparse
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
from router.process.scheduling import new_scheduler


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    parser.epilog = "Exits with 0 if all commands are the same, with 1 at the first difference."
    parser.add_argument("file", metavar="FILE", help="a journal that a router wrote with --journal")
    parser.set_defaults(run=lambda options: _replay(Path(options["file"])))


def _replay(journal: Path) -> int:
    replayed = replay_file(journal)
    print(replayed)
    if replayed.difference is None:
        return 0
    print(replayed.difference)
    return 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A journal entry for which the replay gave other commands than were recorded."""

    line: int
    entry: JournalEntry
    actual: Sequence[Command]

    def __str__(self) -> str:
        """Describe the first command that differs."""
        pairs = zip_longest(self.entry.commands, self.actual)
        expected, actual = next(pair for pair in pairs if pair[0] != pair[1])
        return (
            f"line {self.line}: {type(self.entry.event).__name__} at {self.entry.at}\n"
            f"  expected: {expected or 'no command'}\n"
            f"  actual:   {actual or 'no command'}"
        )


@dataclass(slots=True)
class ReplayResult:
    """The outcome of a replay, which ends with the journal or at the first difference."""

    runs: int = 0
    events: int = 0
    requests: int = 0
    """Arrived requests; a request that was retried at another worker counts once."""
    seconds: float = 0.0
    """The time from the start of each run to its last event, summed over the runs."""
    torn: int = 0
    """Lines that were cut off and skipped."""
    difference: Difference | None = None
    scheduler: Scheduler | None = None
    """The scheduler of the last run after its last event."""

    def __str__(self) -> str:
        """Summarize the replay in one line."""
        torn = f"; {self.torn} cut off at the end of a run and skipped" if self.torn else ""
        differences = 0 if self.difference is None else 1
        return (
            f"runs {self.runs}, events {self.events}, requests {self.requests}, seconds {self.seconds:.1f}, "
            f"differences {differences}{torn}"
        )


def replay(lines: Iterable[bytes]) -> ReplayResult:
    """Feed each run of a journal to a new scheduler, until a command differs from the recorded one.

    Raises ConfigError if the lines are not a journal, or not one that this version can replay.
    """
    result = ReplayResult()
    now = 0.0
    for number, item in enumerate(read(lines), 1):
        match item:
            case JournalHeader():
                result.scheduler = _scheduler_of(item)
                _restore(result.scheduler, item)
                now = item.clock
                result.runs += 1
            case TornLine():
                result.torn += 1
            case JournalEntry(at, event, commands):
                assert result.scheduler is not None, "a run begins with its header"
                result.events += 1
                result.requests += isinstance(event, Arrived) and not event.again
                result.seconds += at - now
                now = at
                actual = result.scheduler.handle(event, at)
                if actual != commands:
                    result.difference = Difference(number, item, actual)
                    break
    return result


def replay_file(path: Path) -> ReplayResult:
    """Replay a journal file. Raises ConfigError, which names the file."""
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
