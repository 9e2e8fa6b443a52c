"""Small simulations for tests: calls given one by one, and an observer that records all events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.workloads.parts.prompts import Prompt, Text
from bench.workloads.parts.traffic import Call, Client
from router.core.model.commands import Command
from router.core.model.events import Event

TEXTS = [Text(range(100_000 * number, 100_000 * number + 5000)) for number in range(3)]


def prompt(own: int, text: int | None = None, shared: int = 5000) -> Prompt:
    """Return the first `shared` tokens of a text, or of none, and `own` tokens that are the same for all prompts."""
    head = TEXTS[text].tokens[:shared] if text is not None else ()
    return Prompt(Text(head), tuple(range(10_000_000, 10_000_000 + own)))


def own_prompt(number: int, length: int) -> Prompt:
    """Return `length` tokens that share no prefix with the prompt of another number."""
    return Prompt(Text(), tuple(range(1000 * number + 1, 1000 * number + 1 + length)))


@dataclass(frozen=True, slots=True)
class Scripted:
    """A workload of given calls."""

    calls: tuple[tuple[str, Call], ...]
    """Each call with the name of its client."""
    weights: tuple[tuple[str, float], ...] = ()

    def clients(self, seed: int) -> Sequence[Client]:  # noqa: ARG002 - nothing is random
        weights = dict(self.weights)
        names = dict.fromkeys(name for name, _ in self.calls)
        return [Client(name, self._of(name), weights.get(name, 1.0)) for name in names]

    def _of(self, name: str) -> Iterable[Call]:
        return sorted((call for client, call in self.calls if client == name), key=lambda call: call.at)


class EventLog:
    """Records the scheduler's events and commands."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.commands: list[tuple[float, Command]] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.events.append((now, event))
        self.commands += ((now, command) for command in commands)
