"""Several families at once: misbehaving clients beside others, and mixes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Self

from bench.workloads.chat import Chat
from bench.workloads.judge import Judge
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Client
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.tree_of_thoughts import TreeOfThoughts


@dataclass(frozen=True, slots=True)
class Combined:
    """Workloads that run side by side; the fields that a subclass adds are its parts.

    The clients of a part are named after it: just its name if there is one, else `name-1` and so on. Raises ValueError
    if a rate is given and a part has no rate to change.
    """

    rate: float = 0.0
    """Sessions per second of all parts together, divided in proportion to their own rates; 0 leaves these."""

    def __post_init__(self) -> None:
        if self.rate < 0 or (self.rate and not all(part.rate for part in self.parts.values())):
            raise ValueError("a workload with this rate has parts with a rate")

    @property
    def parts(self) -> Mapping[str, RatedWorkload]:
        """Return the parts by name, as they were given."""
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in each.items() if isinstance(part, RatedWorkload)}

    def at_rate(self, rate: float) -> Self:
        """Return a copy with this rate."""
        return replace(self, rate=rate)

    def clients(self, seed: int) -> Sequence[Client]:
        total = sum(part.rate for part in self.parts.values())
        factor = self.rate / total if self.rate else 1.0
        return [
            client
            for name, part in self.parts.items()
            for client in _named(name, replace(part, rate=part.rate * factor), seed)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaving(Combined):
    """One family twice: with the misbehaving client's parameters and with those of the others (DLPM paper, table 3).

    S1, more requests: a higher rate or concurrency, more branches, more dimensions. S2, a longer prefix.
    """

    heavy: RatedWorkload
    light: RatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Reforming(Misbehaving):
    """With a second misbehaving client, which behaves like the others after a while (DLPM paper, figure 8)."""

    reformed: RatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAndPrograms(Combined):
    """Chat clients beside one with trees of thoughts and one with judgements (DLPM paper, figure 12)."""

    chat: Chat
    trees: TreeOfThoughts
    judge: Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsAndVideos(Combined):
    """ToolBench beside questions about videos (Preble, figure 4)."""

    tools: SharedPrefix
    videos: SharedPrefix


def _named(name: str, part: RatedWorkload, seed: int) -> Sequence[Client]:
    """Return the part's clients under its name, seeded by it."""
    clients = part.clients(Random(f"{seed} {name}").getrandbits(64))
    names = [name] if len(clients) == 1 else [f"{name}-{number}" for number in range(1, len(clients) + 1)]
    return [replace(client, name=own) for client, own in zip(clients, names, strict=True)]
