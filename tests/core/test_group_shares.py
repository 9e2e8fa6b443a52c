"""The members of a group share one weight, whatever they do to gain more, under every policy that weighs clients."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request, RequestId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from tests.core.scenario import ONE_AT_A_TIME, Scene, key

WEIGHING = ["d2lpm", "dlpm_home", "vtc"]
TURNS = 600
QUANTA = (DlpmParameters(quantum=200.0), DlpmHomeParameters(quantum=200.0))
"""Of about six prompts, so that there are many rounds in a test."""


def request(client: str, weight: float, group: str | None, group_weight: float = 1.0) -> Request:
    return Request(
        RequestId(client),
        ClientId(client),
        "m",
        (key("x"),),
        weight=weight,
        group=None if group is None else GroupId(group),
        group_weight=group_weight,
    )


members = st.tuples(st.sampled_from("abcde"), st.sampled_from([1.0, 2.0, 0.1]), st.sampled_from([None, "g", "h"]))


@given(st.lists(members), st.data())
def test_the_active_members_share_their_groups_weight(
    told: list[tuple[str, float, str | None]], data: st.DataObject
) -> None:
    """Whoever joins, leaves or changes, the active members together have the group's weight, each in proportion to its
    own.
    """
    shares, groups = Shares(), {"g": 3.0, "h": 0.5, None: 1.0}
    active: Counter[str] = Counter()
    latest: dict[str, Request] = {}
    for name, weight, group in told:
        latest[name] = request(name, weight, group, groups[group])
        shares.add_request(latest[name])
        active[name] += 1
        if data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(sorted(active.elements())))
            shares.remove_request(ClientId(ended))
            active[ended] -= 1
        now = [latest[each] for each in set(active.elements())]
        for label, whole in groups.items():
            mates = [each for each in now if each.group == label]
            own = sum(each.weight for each in mates)
            for each in mates:
                assert shares.effective_weight(each) == pytest.approx(
                    each.weight if label is None else whole * each.weight / own
                )
        parts = [shares.fleet_share(each.client, each.weight, each.group, each.group_weight) for each in now]
        assert not now or sum(parts) == pytest.approx(1.0)


class Rivals:
    """A group and a client of the same weight, both of which always have a request queued."""

    def __init__(self, policy: str) -> None:
        self.scene = Scene(policy, *QUANTA, settings=ONE_AT_A_TIME)
        self.served: Counter[str] = Counter()
        self._of: dict[RequestId, str] = {}
        self._numbers = count()
        for _ in range(3):
            self.ask("single", None)

    def ask(self, client: str, group: str | None, weight: float = 1.0) -> None:
        """Send a prompt that shares no prefix with another."""
        prompt = chr(1000 + next(self._numbers))
        self._of[self.scene.arrive(client, prompt, group=group, weight=weight)] = client

    def turn(self) -> str:
        """Serve what is in flight. Returns the client served."""
        running = self.scene.order[-1]
        client = self._of[running]
        self.scene.serve(running)
        self.served["single" if client == "single" else "group"] += 1
        if client == "single":
            self.ask("single", None)
        return client

    @property
    def ratio(self) -> float:
        """Return the service of the group divided by that of the client."""
        return self.served["group"] / self.served["single"]


@pytest.mark.parametrize("policy", WEIGHING)
@pytest.mark.parametrize("size", [1, 10])
def test_a_group_of_ten_keys_has_as_much_as_one(policy: str, size: int) -> None:
    """Ten members that always wait are served together as much as one client of the group's weight."""
    rivals = Rivals(policy)
    names = [f"member{number}" for number in range(size)]
    for name in names * 3:
        rivals.ask(name, "team")
    for _ in range(TURNS):
        client = rivals.turn()
        if client != "single":
            rivals.ask(client, "team")
    assert rivals.ratio == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("policy", WEIGHING)
@pytest.mark.parametrize("names", [7, 10_000])
def test_members_that_take_turns_gain_nothing(policy: str, names: int) -> None:
    """A group whose every request has another client name, new or used before, gets no more than its weight."""
    rivals, fresh = Rivals(policy), count()
    for _ in range(3):
        rivals.ask(f"name{next(fresh) % names}", "team")
    for _ in range(TURNS):
        if rivals.turn() != "single":
            rivals.ask(f"name{next(fresh) % names}", "team")
    assert rivals.ratio <= 1.1


@pytest.mark.parametrize("policy", WEIGHING)
def test_members_share_by_their_own_weights(policy: str) -> None:
    """Within a group, a member with twice the weight is served twice as much."""
    rivals, served = Rivals(policy), Counter[str]()
    weights = {"light": 1.0, "heavy": 2.0}
    for name, weight in weights.items():
        for _ in range(4):
            rivals.ask(name, "team", weight)
    for _ in range(TURNS):
        client = rivals.turn()
        if client != "single":
            served[client] += 1
            rivals.ask(client, "team", weights[client])
    assert served["heavy"] / served["light"] == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_a_members_debt_does_not_change_with_its_weight(policy: str) -> None:
    """Members that come and go change its share, not its deficit."""
    scene = Scene(policy, *QUANTA, settings=ONE_AT_A_TIME)
    scene.arrive("ann", "abcdefghij", group="team")
    owed = scene.deficit("ann").order
    for number in range(5):
        scene.arrive(f"member{number}", "x", group="team")
    assert owed is not None
    assert owed < 0
    assert scene.deficit("ann").order == owed


def turns_beside_another_model(group: str | None) -> Counter[str]:
    """Return how often each of two clients of one worker has a turn: ada with one request at a time, in this group, and
    bob with several. At another worker, a client that is eligible always waits for another model.
    """
    parameters = DlpmHomeParameters(
        quantum=200.0, head_start=0.0, round_seconds=0.0, overdue_after=0.0, sparse_first=False, cached_first=False
    )
    scene = Scene("dlpm_home", parameters, workers=(), settings=ONE_AT_A_TIME)
    scene.join("w1", "m1")
    scene.join("w2", "m2")
    for _ in range(2):
        scene.arrive("cyd", "c", model="m2")
    for client in ("ada", "bob", "bob", "bob"):
        scene.arrive(client, client, model="m1", group=group if client == "ada" else None)
    turns = Counter[str]()
    for _ in range(TURNS // 2):
        served = next(each for each in scene.scheduler.attempts if each[:3] != "cyd")
        client = served[:3]
        turns[client] += 1
        scene.serve(served, 20)
        scene.arrive(client, client, model="m1", group=group if client == "ada" else None)
    return turns


def test_a_group_is_refilled_where_its_members_are() -> None:
    """Where workers serve different models, a group of one client is served as that client would be without a group,
    although a refill there does not count for all.
    """
    assert turns_beside_another_model("team") == turns_beside_another_model(None)


class CountingShares(Shares):
    """Counts how often a share is asked for."""

    asked = 0

    def scale(self, group: GroupId | None) -> float:
        self.asked += 1
        return super().scale(group)


def asked_per_turn(members: int) -> float:
    """Return how often the scheduler asks for a weight to serve one request of a group with this many members."""
    rivals = Rivals("dlpm_home")
    shares = rivals.scene.scheduler.shares
    shares.__class__ = CountingShares
    assert isinstance(shares, CountingShares)
    for number in range(members):
        rivals.ask(f"member{number}", "team")
    before = shares.asked
    for _ in range(200):
        client = rivals.turn()
        if client != "single":
            rivals.ask(client, "team")
    return (shares.asked - before) / 200


@pytest.mark.interpreted("the test changes the class of an object")
def test_a_decision_costs_the_same_in_a_large_group() -> None:
    """Forty times as many waiting members do not make the scheduler look at more of them."""
    assert asked_per_turn(400) < 2 * asked_per_turn(10) + 5
