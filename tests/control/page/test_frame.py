"""A frame of the live page: which clients it has, and that it is /fairness otherwise."""

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from router.control.page.frame import DEFICIT_WORKERS, ORDERS, TOP, Frame, frame_json, search
from router.core.model.commands import Deficit
from router.core.model.request import ClientId, RequestId, WorkerId
from router.telemetry.explain import RecentDecision
from router.telemetry.report import ClientReport, FairnessReport, Service, WorkerReport

FRAME = TypeAdapter(Frame)
NUMBERS = st.sampled_from([0.0, 0.25, 1.0, 8.0])
CLIENTS = st.builds(
    lambda share, queued, wait, unserved, lag: ClientReport(
        1.0, Service(1, 2, 3, 4.0), int(queued), 1, wait, wait, {}, share, lag, unserved
    ),
    NUMBERS,
    NUMBERS,
    st.none() | NUMBERS,
    st.none() | NUMBERS,
    NUMBERS,
)
DECISION = RecentDecision(7, 99.5, RequestId("r"), ClientId("c0"), WorkerId("w0"), "home", 0.5, 12, 3)


def report(clients: dict[str, ClientReport], workers: int = 1) -> FairnessReport:
    cards = {WorkerId(f"w{at}"): WorkerReport("http://w", True, 0, 0, 0, None, None, 2.0, 8.0) for at in range(workers)}
    named = {ClientId(name): client for name, client in clients.items()}
    return FairnessReport("dlpm", 0.5, named, Service(10, 0, 20, 30.0), cards)


def frame(of: FairnessReport) -> Frame:
    return FRAME.validate_json(asyncio.run(frame_json(of, [DECISION], 100.0, 0.002)))


@given(st.lists(CLIENTS, max_size=90))
def test_a_frame_has_the_first_clients_by_every_order(drawn: list[ClientReport]) -> None:
    """No client outside a frame is ahead of the twentieth in it, and each is as in /fairness; totals are of all."""
    clients = {f"c{at}": client for at, client in enumerate(drawn)}
    shown = frame(report(clients))
    kept = shown.fairness.clients
    assert all(clients[name] == client for name, client in kept.items())
    assert len(kept) <= len(ORDERS) * TOP
    left_out = [client for name, client in clients.items() if name not in kept]
    for order in ORDERS:
        inside = sorted(map(order, kept.values()), reverse=True)[:TOP]
        assert not left_out or max(map(order, left_out)) <= inside[-1]
    assert (shown.totals.clients, shown.totals.running) == (len(clients), len(clients))
    assert shown.totals.queued == sum(client.queued for client in drawn)
    assert (shown.totals.extend, shown.totals.output) == (10 + len(drawn), 20 + 3 * len(drawn))


def test_a_frame_is_otherwise_what_fairness_reports() -> None:
    """It has the report with its workers, the decisions, the time and the cost of the frame before."""
    whole = report({"c0": ClientReport(2.0, Service(1, 2, 3, 4.0), 0, 0, None, None, {WorkerId("w0"): Deficit(1.0)})})
    assert frame(whole) == Frame(100.0, whole, frame(whole).totals, [DECISION], 0.002)


def test_deficits_at_the_first_workers_only_are_sent() -> None:
    """The size of a frame is bounded where a fleet is large."""
    deficits = {WorkerId(f"w{at}"): Deficit(order=float(at)) for at in range(DEFICIT_WORKERS + 10)}
    client = ClientReport(1.0, Service(0, 0, 0, 0.0), 0, 0, None, None, deficits)
    shown = frame(report({"c": client}, DEFICIT_WORKERS + 10)).fairness
    assert [*shown.clients[ClientId("c")].deficit] == [WorkerId(f"w{at}") for at in range(DEFICIT_WORKERS)]
    assert len(shown.workers) == DEFICIT_WORKERS + 10


def test_a_search_finds_part_of_a_name() -> None:
    """It takes either case, puts a client of exactly this name first, and the others by their shares."""
    client = ClientReport(1.0, Service(0, 0, 0, 0.0), 0, 0, None, None, {})
    clients = {ClientId(f"Team-{at}"): replace(client, share=at / 1000) for at in range(100)}
    assert [*search(clients, "team-1")][:2] == ["Team-19", "Team-18"]
    assert [*search(clients, "Team-1")][:3] == ["Team-1", "Team-19", "Team-18"]
    assert len(search(clients, "EAM")) == TOP
    assert not search(clients, "other")
