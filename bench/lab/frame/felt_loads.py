"""The loads under which the experience of clients is measured."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bench.lab.frame.conditions import POLICIES_SPAN, Span
from bench.lab.frame.loads import loaded
from bench.sim.scenario import WorkerSpec
from bench.workloads.crowds import CHATS, COLD, DOCUMENTS, HOLDERS, LIGHT, POLITE, Crowd, Flood
from bench.workloads.parts.traffic import Workload
from bench.workloads.registry import WORKLOADS

WORKERS: Final = 2
SMALL: Final = WorkerSpec(max_running=16)
"""The fleet in front of which a crowd of 60 waits."""
LARGE: Final = WorkerSpec()
FEW_DOCUMENTS: Final = WorkerSpec(kv_tokens=round(0.7 * DOCUMENTS.documents * DOCUMENTS.tokens / WORKERS))
"""The caches hold 70 % of the documents."""
FEW_CONTEXTS: Final = WorkerSpec(kv_tokens=150_000)
"""Three long contexts take 60 % of both caches."""
CROWD_SPAN: Final = Span(140.0, 40.0)
"""The first computation of all prefixes takes 30 s of the fleet."""
LARGE_CROWD_SPAN: Final = Span(320.0, 150.0)
"""A fair round of a thousand clients whose prefixes are never cached takes as long as the warm-up."""
SPAN: Final = Span(90.0, 20.0)


class Load:
    """A workload, the workers that serve it, and how long."""

    __slots__ = ("span", "spec", "workload")

    def __init__(self, workload: Workload, spec: WorkerSpec = LARGE, span: Span = SPAN) -> None:
        self.workload = workload
        self.spec = spec
        self.span = span


def crowd(clients: int, span: Span = CROWD_SPAN) -> Load:
    """Return a load of polite clients."""
    return Load(Crowd(crowd=replace(POLITE, client_count=clients), light=LIGHT), SMALL, span)


def cold_flood(open_calls: int) -> Load:
    """Return a load of one client with `open_calls` cold prompts open beside four with 32 chat calls each."""
    return Load(Flood(heavy=replace(COLD, concurrency=open_calls), honest=CHATS, light=LIGHT))


def chat_flood(calls: int) -> Load:
    """Return a load of one client with 200 chat calls open beside four with `calls` each."""
    heavy = replace(CHATS, client_count=1, concurrency=200)
    return Load(Flood(heavy=heavy, honest=replace(CHATS, concurrency=calls), light=LIGHT))


def documents_flood(calls: int, clients: int = 8) -> Load:
    """Return a load of `clients` clients with 128 questions about documents beside four with `calls`
    chat calls each.
    """
    heavy = replace(DOCUMENTS, client_count=clients, concurrency=128 // clients)
    return Load(Flood(heavy=heavy, honest=replace(CHATS, concurrency=calls), light=LIGHT), FEW_DOCUMENTS)


def holders(contexts: int) -> Load:
    """Return a load of one client with `contexts` long contexts, each in use, beside four with 32 chat calls each."""
    heavy = replace(HOLDERS, groups=contexts, concurrency=contexts)
    return Load(Flood(heavy=heavy, honest=CHATS, light=LIGHT), FEW_CONTEXTS)


FELT_LOADS: Final[Mapping[str, Load]] = {
    "crowd of 20": crowd(20),
    "crowd of 60": crowd(60),
    "crowd of 200": crowd(200),
    "crowd of 1000": crowd(1000, LARGE_CROWD_SPAN),
    "documents": Load(WORKLOADS["documents-crowd"], FEW_DOCUMENTS),
    "documents, 4x16 chats": documents_flood(16),
    "documents, 4x4 chats": documents_flood(4),
    "documents of one, 4x16 chats": documents_flood(16, clients=1),
    "documents of one, 4x4 chats": documents_flood(4, clients=1),
    "4 cold prompts, 4x32 chats": cold_flood(4),
    "16 cold prompts, 4x32 chats": cold_flood(16),
    "32 cold prompts, 4x32 chats": cold_flood(32),
    "200 chats, 4x4": chat_flood(4),
    "200 chats, 4x24": chat_flood(24),
    "200 chats, 4x64": chat_flood(64),
    "cancellers": Load(WORKLOADS["cancellers"]),
    "3 KV holders": holders(3),
    "6 KV holders": holders(6),
    "coding agents": Load(WORKLOADS["coding-agents"], LARGE, CROWD_SPAN),
    "ServeGen": Load(WORKLOADS["servegen-mid"]),
    "trees": Load(loaded("tot", WORKERS), LARGE, POLICIES_SPAN),
    "judgements": Load(loaded("judge", WORKERS), LARGE, POLICIES_SPAN),
}
"""The loads by name."""
TRACED: Final[Mapping[str, str]] = {"ServeGen": "servegen", "coding agents": "sessions"}
"""The loads that stand in for a trace, and its kind."""


def felt_load(name: str, traces: Mapping[str, Workload]) -> Load:
    """Return a load by its name, with the trace that it stands in for if that is given."""
    usual = FELT_LOADS[name]
    trace = traces.get(TRACED.get(name, ""))
    return usual if trace is None else Load(trace, usual.spec, usual.span)
