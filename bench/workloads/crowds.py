"""Loads under which clients feel what a queue's books do not show: polite crowds, floods, documents beside chats,
clients that give up, that hold the KV caches, that let agents work.

In each of them two light clients ask one short thing at a time. What they wait is what anybody waits who asks little.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bench.workloads.chat import Chat
from bench.workloads.combined import Combined
from bench.workloads.documents import SharedDocuments
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Workload
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.unrelated import Unrelated


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd(Combined):
    """Equal clients, beside light ones."""

    crowd: RatedWorkload
    light: RatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood(Combined):
    """One or more that ask for much, honest clients that would take their share, and light ones."""

    heavy: RatedWorkload
    honest: RatedWorkload
    light: RatedWorkload


LIGHT: Final = Unrelated(client_count=2, input=300, output=50, concurrency=1, think=1.0)
POLITE: Final = SharedPrefix(
    client_count=200,
    concurrency=1,
    groups=1,
    own=True,
    prefix=Lengths(3000),
    question=Lengths(60),
    output=Lengths(100),
)
"""Each has one call open and a prefix of its own: a call costs 3,260 units at first and 260 from then on."""
CHATS: Final = Unrelated(client_count=4, input=500, output=150, spread=0.5, concurrency=32)
"""Single questions; as many open as `concurrency` says."""
COLD: Final = Unrelated(client_count=1, input=20_000, output=16, concurrency=32)
DOCUMENTS: Final = SharedDocuments(client_count=8, documents=32, tokens=8000, concurrency=16)
GIVING_UP: Final = Unrelated(client_count=4, input=1500, output=600, spread=0.5, concurrency=24, patience=6.0)
"""Most of their calls are given up, many of them after the prompt and half of the answer were computed."""
HOLDERS: Final = SharedPrefix(
    client_count=1,
    concurrency=3,
    groups=3,
    own=True,
    prefix=Lengths(60_000, most=60_000),
    question=Lengths(100),
    output=Lengths(2000),
)
"""Few calls, cheap once their contexts are cached, that fill the KV caches with these."""
AGENTS: Final = Chat(
    client_count=12,
    concurrency=3,
    systems=200,
    system=22_000,
    turns=Lengths(17, 10, most=45),
    question=Lengths(900, 1200, most=8000),
    output=Lengths(350, 450, most=3000),
    reading=12.0,
)
"""Coding agents: a tool's result follows each answer. Lengths are those of recorded sessions (`bench.workloads.recorded.sessions`), as far
as contexts of 60,000 tokens; what they begin with, tools, system prompt and task, few others share. Tools take about
as long as their median there; the mean, of minutes, is that of people."""

CROWDS: Final[Mapping[str, Workload]] = {
    "crowd": Crowd(crowd=POLITE, light=LIGHT),
    "flood": Flood(heavy=COLD, honest=CHATS, light=LIGHT),
    "chat-flood": Flood(
        heavy=replace(CHATS, client_count=1, concurrency=200), honest=replace(CHATS, concurrency=24), light=LIGHT
    ),
    "documents-crowd": Crowd(crowd=DOCUMENTS, light=LIGHT),
    "cancellers": Flood(heavy=GIVING_UP, honest=replace(CHATS, concurrency=16), light=LIGHT),
    "kv-holders": Flood(heavy=HOLDERS, honest=CHATS, light=LIGHT),
    "coding-agents": Crowd(crowd=AGENTS, light=LIGHT),
    "documents-flood": Flood(heavy=DOCUMENTS, honest=replace(CHATS, concurrency=16), light=LIGHT),
}
"""By name; how many there are and what each has open is a parameter, as in `crowd:crowd.client_count=60`."""
