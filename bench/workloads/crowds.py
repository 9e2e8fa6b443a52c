"""Loads whose effect on clients the queue's own accounts do not show.

Polite crowds, floods, documents beside chats, clients that give up, clients that fill the KV caches, clients that run
agents. Each load has two light clients that ask one short question at a time: their wait is that of anyone who asks
little.
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
    """Equal clients beside light ones."""

    crowd: RatedWorkload
    light: RatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood(Combined):
    """One or more clients with heavy traffic, honest clients that would use their share, and light ones."""

    heavy: RatedWorkload
    honest: RatedWorkload
    light: RatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class AidedFlood(Flood):
    """A flood, and an accomplice with few long calls, beside whose service that of the flood stands out less."""

    accomplice: RatedWorkload


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
"""Each client has one call open and a prefix of its own: the first call costs 3,260 units and later ones 260."""
CHATS: Final = Unrelated(client_count=4, input=500, output=150, spread=0.5, concurrency=32)
"""Single questions, `concurrency` of them open per client."""
COLD: Final = Unrelated(client_count=1, input=20_000, output=16, concurrency=32)
DOCUMENTS: Final = SharedDocuments(client_count=8, documents=32, tokens=8000, concurrency=16)
GIVING_UP: Final = Unrelated(client_count=4, input=1500, output=600, spread=0.5, concurrency=24, patience=6.0)
"""Most of their calls are cancelled, many after the prompt and half of the answer were computed."""
HOLDERS: Final = SharedPrefix(
    client_count=1,
    concurrency=3,
    groups=3,
    own=True,
    prefix=Lengths(60_000, most=60_000),
    question=Lengths(100),
    output=Lengths(2000),
)
"""Few calls, cheap once their contexts are cached, that fill the KV caches with these contexts."""
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
"""Coding agents: each answer is followed by the result of a tool.

Lengths are those of recorded sessions (`bench.workloads.recorded.sessions`) with contexts of up to 60,000 tokens. Few
agents share what their prompts begin with: tools, system prompt and task. Tools take about as long as the median tool
there; the mean, of minutes, comes from people.
"""

CROWDS: Final[Mapping[str, Workload]] = {
    "crowd": Crowd(crowd=POLITE, light=LIGHT),
    "flood": Flood(heavy=COLD, honest=CHATS, light=LIGHT),
    "aided-flood": AidedFlood(heavy=COLD, honest=CHATS, light=LIGHT, accomplice=replace(COLD, concurrency=1)),
    "chat-flood": Flood(
        heavy=replace(CHATS, client_count=1, concurrency=200), honest=replace(CHATS, concurrency=24), light=LIGHT
    ),
    "documents-crowd": Crowd(crowd=DOCUMENTS, light=LIGHT),
    "cancellers": Flood(heavy=GIVING_UP, honest=replace(CHATS, concurrency=16), light=LIGHT),
    "kv-holders": Flood(heavy=HOLDERS, honest=CHATS, light=LIGHT),
    "coding-agents": Crowd(crowd=AGENTS, light=LIGHT),
    "documents-flood": Flood(heavy=DOCUMENTS, honest=replace(CHATS, concurrency=16), light=LIGHT),
}
"""The loads by name. How many clients there are, and what each has open, are parameters, as in
`crowd:crowd.client_count=60`.
"""
