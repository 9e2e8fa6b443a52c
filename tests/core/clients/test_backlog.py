"""Backlogs equal those counted from a list of all waiting requests."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.backlog import Backlog
from router.core.model.request import ClientId, WorkerId

QUEUES = (None, WorkerId("w1"), WorkerId("w2"))
CLIENTS = (ClientId("ada"), ClientId("bob"))

Place = tuple[WorkerId | None, ClientId]


class Recorder:
    """Records all notifications."""

    def __init__(self) -> None:
        self.notifications: list[tuple[str, WorkerId | None, ClientId, float]] = []

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        self.notifications.append(("began", queue, client, now))

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        self.notifications.append(("ended", queue, client, now))


@given(places=st.lists(st.tuples(st.sampled_from(QUEUES), st.sampled_from(CLIENTS)), max_size=30), data=st.data())
def test_counts_and_notifications_match_a_list(places: list[Place], data: st.DataObject) -> None:
    """A backlog begins with a client's first request in a queue and ends with the last; all counts match the list."""
    backlog, recorder = Backlog(), Recorder()
    backlog.subscribe(recorder)
    waiting: list[Place] = []
    for now, place in enumerate(places):
        before = len(recorder.notifications)
        if bool(waiting) and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(waiting))  # noqa: PLW2901 - one that waits leaves instead
            waiting.remove(place)
            backlog.remove(*place, now)
            expected = [] if place in waiting else [("ended", *place, now)]
        else:
            expected = [] if place in waiting else [("began", *place, now)]
            waiting.append(place)
            backlog.add(*place, now)
        assert recorder.notifications[before:] == expected
        assert {(at, who) for at, clients in backlog._waiting.items() for who in clients} == set(waiting)
        for queue in QUEUES:
            assert backlog.length(queue) == sum(at == queue for at, _ in waiting)
        for client in CLIENTS:
            assert backlog.of_client(client) == sum(who == client for _, who in waiting)
