"""The bound on how differently two clients are served that both have paused calls (docs/policies.md)."""

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId, RequestId
from tests.core.policies.sessions.scenes import SMALL, GatedScene
from tests.core.scenario import CHUNK_TOKENS

COST: Final = LinearCost()
CONTEXT: Final = 10
"""Chunks of every context."""
PLACES: Final = 3
MOST_OUTPUT: Final = 100
SESSIONS: Final = {"ada": 4, "bob": 8}


class ClosedLoop:
    """Two clients, more of whose sessions want to go on than fit; each session calls again once it is answered."""

    def __init__(self) -> None:
        self.scene = GatedScene(kv_chunks=CONTEXT * PLACES)
        self._session: dict[RequestId, tuple[str, int]] = {}
        for client, sessions in SESSIONS.items():
            for number in range(sessions):
                self._call(client, number)
        self.most_admitted = 0

    def _call(self, client: str, number: int) -> None:
        letter = chr(ord("a") + number) if client == "ada" else chr(ord("A") + number)
        self._session[self.scene.call(client, letter * CONTEXT, f"s{number}")] = client, number

    def answer(self, pick: int, output: int) -> None:
        """Serve one of the calls in flight, whose session calls again at once."""
        running = [*self.scene.scheduler.attempts]
        request = running[pick % len(running)]
        self.scene.serve(request, output)
        self._call(*self._session[request])
        for client in self.scene.gate.table.clients.values():
            self.most_admitted = max(self.most_admitted, client.admitted_tokens)

    def served(self, client: str) -> float:
        """Return the client's service in cost units."""
        account = self.scene.scheduler.ledger.accounts.get(ClientId(client))
        return 0.0 if account is None else COST(account.served)


@settings(max_examples=15, deadline=None)
@given(answers=st.lists(st.tuples(st.integers(0, PLACES), st.integers(0, MOST_OUTPUT)), min_size=50, max_size=150))
def test_two_clients_with_paused_calls_are_served_alike(answers: list[tuple[int, int]]) -> None:
    """While both clients have paused calls, their service differs by at most 2(U + (1 + turn) · w_e · A): A are the
    most context tokens that one of them had places for, and U is the cost of the calls that it can have in flight.
    """
    loop = ClosedLoop()
    before = loop.served("ada") - loop.served("bob")
    in_flight = PLACES * COST(Tokens(CONTEXT * CHUNK_TOKENS, 0, MOST_OUTPUT))
    for pick, output in answers:
        loop.answer(pick, output)
        gap = abs(loop.served("ada") - loop.served("bob") - before)
        assert gap <= 2 * (in_flight + (1 + SMALL.turn) * COST.extend * loop.most_admitted)
        loop.scene.gate.check_integrity()
