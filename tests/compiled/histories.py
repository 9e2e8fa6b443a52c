"""Compare the decisions of compiled and interpreted code on histories: `make test-compiled`.

`record FILE` plays random histories of every policy, in which few requests wait at once, and one of a crowd, and writes
their events, commands, accounts and deficits. `compare FILE` feeds the events to the scheduler that it imports and
expects the same.
"""

import pickle
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from router.cli.compiled import is_compiled
from router.core.clients.queue_limits import WaitingLimits
from router.core.model.commands import Command, Dispatch
from router.core.model.events import Arrived, Event, Finished, Started, WorkerJoined
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.model.saved import Piece
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.snapshot import saved_accounts
from tests.core.scenario import MODEL, key
from tests.core.test_conformance import NAMES, PARAMETERS, TIGHT, Fleet, build

HISTORIES: Final = 520
"""In all but those of crowds; the policies have equally many."""
CROWD: Final = 40
"""Clients of a crowd; most of them wait at any time."""
CROWD_CALLS: Final = 400


class History(NamedTuple):
    """What happened to one scheduler."""

    policy: str
    crowded: bool
    steps: list[tuple[Event, float, list[Command]]]
    accounts: list[Piece]
    """Accounts and deficits after the last event."""


def build_roomy(policy: str) -> Scheduler:
    """Return a scheduler in which a crowd can wait."""
    return Scheduler(POLICIES[policy], replace(TIGHT, waiting=WaitingLimits()), PARAMETERS, Random(0))


def crowd(policy: str) -> History:
    """Play a crowd before two workers, each client of which sends its next call when its last one ends.

    Each has a prompt of its own, which grows by what is new; all of them together exceed the caches.
    """
    scheduler, chance, names, now = build_roomy(policy), Random(1), count(), 0.0
    steps: list[tuple[Event, float, list[Command]]] = []
    running: deque[RequestId] = deque()
    requests: dict[RequestId, Request] = {}

    def feed(event: Event) -> None:
        commands = scheduler.handle(event, now)
        steps.append((event, now, commands))
        running.extend(command.request for command in commands if isinstance(command, Dispatch))

    def call(client: ClientId) -> None:
        name = RequestId(f"r{next(names)}")
        text = chr(ord("A") + int(client)) * chance.randint(1, 3) + chance.choice("xyz") * chance.randint(0, 1)
        requests[name] = Request(name, client, MODEL, (key(text),), 20)
        feed(Arrived(requests[name]))

    for worker in ("w1", "w2"):
        feed(WorkerJoined(Worker(WorkerId(worker), frozenset({MODEL}))))
    for client in range(CROWD):
        call(ClientId(str(client)))
    for _ in range(CROWD_CALLS):
        if not running:  # some policies leave all for later
            break
        now += 0.1
        ended = requests.pop(running.popleft())
        feed(Started(ended.id))
        feed(Finished(ended.id, Usage(ended.prompts[0].tokens or 0, chance.randint(1, 20))))
        call(ended.client)
    return History(policy, True, steps, list(saved_accounts(scheduler)))


def record(policy: str, most: int) -> Iterator[History]:
    """Play histories of one policy, the same ones each time."""
    played: list[History] = []

    class Recorded(Fleet):
        def teardown(self) -> None:
            accounts = list(saved_accounts(self.scheduler))  # some requests are live
            played.append(History(policy, False, list(self.history), accounts))
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
    yield crowd(policy)


def difference(history: History) -> str | None:
    """Feed a history to a new scheduler; describe what differs, if anything does."""
    scheduler: Scheduler = build_roomy(history.policy) if history.crowded else build(history.policy)
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
