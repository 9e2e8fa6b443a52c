"""Counts of waiting clients by route and by priority class equal those of a list."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.model.request import ClientId
from router.core.policies.deficit.waiting_index import WaitingIndex

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]
ROUTES = ("llama", "qwen")
CLASSES = 3


class WaitingMachine(RuleBasedStateMachine):
    """Lets requests wait and leave, and clients become eligible and cease to be."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = WaitingIndex(CLASSES)
        self.requests: list[tuple[ClientId, str]] = []
        self.classes: dict[ClientId, int] = {}
        self.ready: dict[ClientId, int] = {}

    @rule(client=st.sampled_from(CLIENTS), route=st.sampled_from(ROUTES))
    def add(self, client: ClientId, route: str) -> None:
        assert self.waiting.add(client, route) == ((client, route) not in self.requests)
        self.requests.append((client, route))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        client, route = request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        assert self.waiting.remove(client, route) == (request not in self.requests)
        if client not in {each for each, _ in self.requests}:
            self.classes.pop(client, None)
            self.ready.pop(client, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), priority_class=st.none() | st.integers(0, CLASSES - 1))
    def set_class(self, data: st.DataObject, priority_class: int | None) -> None:
        client, _ = data.draw(st.sampled_from(self.requests))
        if self.classes.get(client) != priority_class:
            self.waiting.set_class(client, priority_class)
            self.classes.pop(client, None)
            self.ready.pop(client, None)
            if priority_class is not None:
                self.classes[client] = self.ready[client] = priority_class

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), priority_class=st.none() | st.integers(0, CLASSES - 1))
    def set_ready(self, data: st.DataObject, priority_class: int | None) -> None:
        client, _ = data.draw(st.sampled_from(self.requests))
        self.waiting.set_ready(client, priority_class)
        if client not in self.classes:
            self.ready.pop(client, None)
            if priority_class is not None:
                self.ready[client] = priority_class

    @invariant()
    def it_equals_the_list(self) -> None:
        """Each question is answered as by a look at all requests."""
        clients = {client for client, _ in self.requests}
        assert (self.waiting.classes, self.waiting.ready) == (self.classes, self.ready)
        assert self.waiting.routes == {
            client: Counter(route for each, route in self.requests if each == client) for client in clients
        }
        assert self.waiting.by_class == [[*self.classes.values()].count(each) for each in range(CLASSES)]
        for route in ROUTES:
            on_route = {client for client, each in self.requests if each == route}
            assert self.waiting.any_eligible([route]) == any(client in self.classes for client in on_route)
            assert {client for client in clients if self.waiting.wait_on(client, [route])} == on_route
        assert self.waiting.any_eligible() == bool(self.classes)
        for client in CLIENTS:
            assert self.waiting.is_ineligible(client) == (client in clients and client not in self.classes)


TestWaitingIndex = WaitingMachine.TestCase
TestWaitingIndex.settings = settings(max_examples=100, stateful_step_count=30)
