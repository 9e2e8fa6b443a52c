"""Compare the decisions of compiled and interpreted code on random histories: `make test-compiled`.

`record FILE` plays random histories of every policy and writes their events, commands, accounts and deficits;
`compare FILE` feeds the events to the scheduler that it imports and expects the same.
"""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from router.cli.compiled import is_compiled
from router.core.model.commands import Command
from router.core.model.events import Event
from router.core.model.saved import Piece
from router.core.scheduler import Scheduler
from router.core.snapshot import saved_accounts
from tests.core.test_conformance import NAMES, Fleet, build

HISTORIES: Final = 520
"""In all; the policies have equally many."""


class History(NamedTuple):
    """What happened to one scheduler."""

    policy: str
    steps: list[tuple[Event, float, list[Command]]]
    accounts: list[Piece]
    """Accounts and deficits after the last event."""


def record(policy: str, most: int) -> Iterator[History]:
    """Play random histories of one policy, the same ones each time."""
    played: list[History] = []

    class Recorded(Fleet):
        def teardown(self) -> None:
            played.append(
                History(policy, list(self.history), list(saved_accounts(self.scheduler)))
            )  # some requests are live
            super().teardown()

    Recorded.policy = policy
    fixed = settings(
        max_examples=most,
        stateful_step_count=50,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Recorded, settings=fixed)
    yield from played


def difference(history: History) -> str | None:
    """Feed a history to a new scheduler; describe what differs, if anything does."""
    scheduler: Scheduler = build(history.policy)
    for number, (event, now, commands) in enumerate(history.steps):
        given = scheduler.handle(event, now)
        if given != commands:
            return f"{history.policy}: event {number}, {event}: {commands}, and here {given}"
    now_kept = list(saved_accounts(scheduler))
    return None if now_kept == history.accounts else f"{history.policy}: {history.accounts}, and here {now_kept}"


def main(command: str, file: Path) -> int:
    """Record or compare. Returns 1 if anything differs."""
    if command == "record":
        each = -(-HISTORIES // len(NAMES))
        file.write_bytes(pickle.dumps([history for policy in NAMES for history in record(policy, each)]))
        return 0
    histories: list[History] = pickle.loads(file.read_bytes())
    differences = [text for history in histories if (text := difference(history)) is not None]
    print(*differences[:5], sep="\n")
    events = sum(len(history.steps) for history in histories)
    kind = "compiled" if is_compiled() else "interpreted"
    print(f"{kind}: {len(histories)} histories, {events} events, {len(differences)} differences")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
