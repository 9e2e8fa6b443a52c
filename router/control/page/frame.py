"""One frame of the live page: /fairness, cut to the clients that a reader looks at, and the latest decisions."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from typing import Final

from pydantic import TypeAdapter, with_config

from router.core.model.request import ClientId, WorkerId
from router.telemetry.explain import RecentDecision
from router.telemetry.report import ClientReport, FairnessReport, report_json

TOP: Final = 20
"""Clients in a frame for each order in `ORDERS`, and clients in the answer to a search."""
DEFICIT_WORKERS: Final = 64
"""Workers for which a frame has deficits, the first of /fairness."""
ORDERS: Final[Sequence[Callable[[ClientReport], float]]] = (
    lambda client: client.share or 0.0,
    lambda client: client.queued + client.running,
    lambda client: client.wait_p95_s or 0.0,
    lambda client: client.unserved_s or 0.0,
    lambda client: client.service_lag,
)
"""By what the clients of a frame are chosen: the first `TOP` by each of these."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class ClientTotals:
    """All clients together, whether they are in the frame or not."""

    clients: int
    """Clients that the router remembers."""
    open: int
    """Clients with a request that waits or runs."""
    queued: int
    """Requests that wait in the router."""
    running: int
    """Requests at workers."""
    extend: int
    """Input tokens computed so far, also for clients that the router has forgotten."""
    output: int
    """Output tokens so far, also for clients that the router has forgotten."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class Frame:
    """What the live page shows at one time."""

    time: float
    """Seconds since 1970."""
    fairness: FairnessReport
    """As /fairness, with the clients that are first by share, requests, wait, time unserved or lag."""
    totals: ClientTotals
    """All clients together."""
    decisions: list[RecentDecision]
    """The latest decisions, oldest first."""
    cost_s: float
    """Processor time of the frame before, in seconds."""


_TOTALS: Final = TypeAdapter(ClientTotals)
_DECISIONS: Final = TypeAdapter(list[RecentDecision])


async def frame_json(
    report: FairnessReport, decisions: Sequence[RecentDecision], now: float, cost_seconds: float
) -> bytes:
    """Encode a `Frame` as one line of JSON. `now`: seconds since 1970; `cost_seconds`: of the frame before."""
    workers = set(islice(report.workers, DEFICIT_WORKERS))
    shown = {client: _with_deficits_at(workers, report.clients[client]) for client in _busiest(report.clients)}
    fairness = await report_json(replace(report, clients=shown))
    totals, recent = _TOTALS.dump_json(_totals(report)), _DECISIONS.dump_json([*decisions])
    return b'{"time":%.3f,"fairness":%b,"totals":%b,"decisions":%b,"cost_s":%.6f}' % (
        *(now, fairness, totals, recent),
        cost_seconds,
    )


def search(clients: Mapping[ClientId, ClientReport], text: str) -> dict[ClientId, ClientReport]:
    """Return the first `TOP` clients by share whose name has this text in it, in either case.

    A client of exactly this name comes first.
    """
    sought = text.casefold()
    found = [client for client in clients if sought in client.casefold()]
    first = nlargest(TOP, found, key=lambda name: (name == text, ORDERS[0](clients[name])))
    return {client: clients[client] for client in first}


def _busiest(clients: Mapping[ClientId, ClientReport]) -> list[ClientId]:
    """Return the clients of a frame, those with the largest shares first."""
    chosen: dict[ClientId, None] = {}
    for order in ORDERS:
        chosen |= dict.fromkeys(nlargest(TOP, clients, key=lambda client: order(clients[client])))
    return [*chosen]


def _with_deficits_at(workers: Collection[WorkerId], client: ClientReport) -> ClientReport:
    if len(client.deficit) <= DEFICIT_WORKERS:
        return client
    return replace(client, deficit={at: deficit for at, deficit in client.deficit.items() if at in workers})


def _totals(report: FairnessReport) -> ClientTotals:
    clients = report.clients.values()
    return ClientTotals(
        len(clients),
        sum(client.queued + client.running > 0 for client in clients),
        sum(client.queued for client in clients),
        sum(client.running for client in clients),
        report.forgotten.extend + sum(client.service.extend for client in clients),
        report.forgotten.output + sum(client.service.output for client in clients),
    )
