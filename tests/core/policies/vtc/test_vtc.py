"""VTC chooses which client goes next at one worker, and bounds how far the service of two waiting
clients may differ.
"""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.cost import LinearCost
from router.core.model.request import ClientId
from router.core.policies.vtc.vtc import VirtualCounters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

FULL = LinearCost(cached=1.0)
"""VTC's own price: the whole input, cached or not."""


def new_scene() -> Scene:
    return Scene("vtc", settings=ONE_AT_A_TIME)


def served(scene: Scene, client: str) -> float:
    """Return c_i: the client's service and lifts."""
    deficit = scene.deficit(client).order
    assert deficit is not None
    return -deficit


def test_the_least_served_client_goes_next() -> None:
    """The least served client goes next however long others have waited; one client's requests go in
    order of arrival.
    """
    scene = new_scene()
    big, bigger, last = scene.arrive("ada", "document 1"), scene.arrive("ada", "document 22"), scene.arrive("ada", "a")
    small, smaller = scene.arrive("bob", "four"), scene.arrive("bob", "two")
    scene.serve_all()
    assert scene.order == [big, bigger, small, smaller, last]


def test_a_cached_prompt_costs_as_much_as_an_uncached_one() -> None:
    """VTC ignores prefixes: the whole input is charged at once."""
    scene = new_scene()
    scene.serve(scene.arrive("ada", "document"))
    cached = scene.arrive("ada", "document")
    assert scene.dispatched[cached].cached_tokens > 0
    assert served(scene, "ada") == 16 * CHUNK_TOKENS


def test_output_is_charged_while_it_streams_and_corrected_by_usage() -> None:
    """A long answer counts against its client before it has ended; an overcharge is refunded."""
    scene = new_scene()
    answer = scene.arrive("ada", "why?", limit=300)
    scene.progress(answer, 100)
    assert served(scene, "ada") == 4 * CHUNK_TOKENS + 2 * 100
    scene.finish(answer, 90)
    assert served(scene, "ada") == 4 * CHUNK_TOKENS + 2 * 90
    scene.refuse(scene.arrive("ada", "why?"))
    assert served(scene, "ada") == 4 * CHUNK_TOKENS + 2 * 90


def test_a_running_answer_lets_others_pass() -> None:
    """A counter that rises while its client waits counts at the next choice."""
    scene = new_scene()
    running = scene.arrive("ada", "a", limit=900)
    mine, other = scene.arrive("ada", "one"), scene.arrive("bob", "document")
    scene.progress(running, 900)
    scene.finish(running)
    scene.finish(other)
    assert scene.order == [running, other, mine]


def test_absence_earns_nothing() -> None:
    """A client that returns while others wait starts with the lowest of their counters, not with its own old one."""
    scene = new_scene()
    scene.serve(scene.arrive("ada", "a"))
    for _ in range(4):
        scene.arrive("bob", "document")
    scene.serve(scene.order[-1])
    assert served(scene, "bob") == (1 + 2 * 8) * CHUNK_TOKENS
    back, again = scene.arrive("ada", "document"), scene.arrive("ada", "document")
    assert served(scene, "ada") == served(scene, "bob")
    scene.serve_all()
    assert [scene.requests[request].client for request in scene.order[3:]] == ["bob", "ada", "bob", "ada"]
    assert scene.order[4::2] == [back, again]


def test_a_lift_never_lowers_a_counter() -> None:
    """A client with much service that leaves for a moment returns with its own counter."""
    scene = new_scene()
    running, heavy = scene.arrive("bob", "a"), scene.arrive("ada", "document 1")
    light = [scene.arrive("bob", letter) for letter in "abc"]
    scene.finish(running)
    before = served(scene, "ada")
    again = scene.arrive("ada", "document 2")
    assert served(scene, "ada") == before > served(scene, "bob")
    scene.serve_all()
    assert scene.order == [running, heavy, *light, again]


def test_in_an_empty_queue_a_counter_is_lifted_to_that_of_the_last_client() -> None:
    """The counter is lifted to the present value of the last client's counter, not to the value when
    that client left.
    """
    scene = new_scene()
    running = scene.arrive("ada", "document", limit=100)
    scene.progress(running, 100)
    scene.arrive("bob", "one")
    assert served(scene, "bob") == served(scene, "ada") == 8 * CHUNK_TOKENS + 2 * 100
    scene.serve(running)
    scene.arrive("cyd", "two")
    assert served(scene, "cyd") == served(scene, "bob") == 11 * CHUNK_TOKENS + 2 * 100


def test_a_withdrawn_request_costs_nothing() -> None:
    """No counter counts a withdrawn request as service."""
    scene = new_scene()
    running = scene.arrive("ada", "one")
    gone, stays = scene.arrive("bob", "document"), scene.arrive("bob", "two")
    scene.cancel(gone)
    assert served(scene, "bob") == 3 * CHUNK_TOKENS
    scene.cancel(stays)
    other = scene.arrive("cyd", "ten")
    scene.finish(running)
    assert scene.order == [running, other]


def test_counters_outlive_a_worker_that_leaves_and_comes_back() -> None:
    """Waiting requests are placed anew in their order, and a client's earlier service still counts."""
    scene = Scene("vtc", workers=("w1", "w2"), settings=ONE_AT_A_TIME)
    for letter in "abcdef":
        scene.arrive("ada", "document" + letter)
    before = served(scene, "ada")
    scene.leave("w1")
    scene.join("w1")
    assert served(scene, "ada") == before
    scene.serve_all()
    first, second, third, fourth, fifth, sixth = scene.requests
    assert scene.order == [first, second, fourth, sixth, third, fifth]


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (2, 3), (0.5, 2)])
def test_backlogged_clients_share_by_weight(weights: tuple[float, float]) -> None:
    """Two clients that always wait are served in proportion to their weights."""
    scene = new_scene()
    for _ in range(40):
        for client, weight in zip(("ada", "bob"), weights, strict=True):
            scene.arrive(client, "document", limit=10, weight=weight)
    for _ in range(30):
        scene.serve(scene.order[-1], output=10)
    count = sum(scene.requests[request].client == "ada" for request in scene.order[:30])
    assert count == pytest.approx(30 * weights[0] / sum(weights), abs=1)


def test_a_new_weight_counts_from_the_next_request_on() -> None:
    """A new weight counts then even for a client that is always backlogged."""
    scene = new_scene()
    for _ in range(3):
        scene.arrive("ada", "document")
    scene.arrive("ada", "document", weight=2.0)
    scene.serve(scene.order[-1])
    assert served(scene, "ada") == (8 + 8 / 2) * CHUNK_TOKENS


def test_without_the_lift_absence_earns_priority() -> None:
    """Under least counter first, a client that returns is served alone until it has caught up with all that it
    missed.
    """
    firsts = {}
    for policy in ("vtc", "lcf"):
        scene = Scene(policy, settings=ONE_AT_A_TIME)
        scene.serve(scene.arrive("ada", "a"))
        for _ in range(10):
            scene.serve(scene.arrive("bob", "document"))
        running = scene.arrive("bob", "document")
        for _ in range(6):
            scene.arrive("bob", "document")
            scene.arrive("ada", "document")
        scene.serve(running)
        scene.serve_all()
        firsts[policy] = [scene.requests[request].client for request in scene.order[12:18]]
    assert firsts == {"vtc": ["bob", "ada"] * 3, "lcf": ["ada"] * 6}


def drift_and_bound(policy: str, seed: int) -> tuple[float, float]:
    """Return how far the full-price service of clients that always wait drifts apart over any interval, and VTC's
    bound.

    Predictions are exact, and a request in flight counts with the most it may cost: its input and its output limit.
    """
    random = Random(seed)
    scene = Scene(policy, settings=SchedulerSettings(window=FixedWindow(requests=4)))
    demands = {"ada": (1.0, 12, 60), "bob": (1.0, 3, 10), "cyd": (2.0, 5, 200)}
    weights = {client: weight for client, (weight, _, _) in demands.items()}
    scheduler, ledger, backlog = scene.scheduler, scene.scheduler.ledger, scene.scheduler.backlog
    spans: dict[tuple[str, str], list[float]] = {pair: [] for pair in combinations(demands, 2)}
    bound = 0.0
    for step in range(300):
        for client, (weight, chunks, limit) in demands.items():
            while backlog.of_client(ClientId(client)) < 6:
                # Of one prompt's beginning, so that most of it is cached.
                prompt = (client[0] * 12)[: random.randint(1, chunks)] + chr(random.randint(48, 122))
                scene.arrive(client, prompt, limit=random.randint(0, limit), weight=weight)
        in_flight = dict.fromkeys(demands, 0)
        for request in scheduler.attempts:
            size = len(scene.requests[request].prompts[0].hashes) // 8 * CHUNK_TOKENS
            client = scene.requests[request].client
            in_flight[client] += size + (scene.requests[request].output_limit or 0)
            bound = max(bound, 2 * size / weights[client], *(4 * n / weights[c] for c, n in in_flight.items()))
        service = {c: FULL(ledger.accounts[ClientId(c)].charged) / weight for c, weight in weights.items()}
        for (one, other), span in spans.items():
            span.append(service[one] - service[other])
        for request in list(scheduler.attempts):
            limit = scene.requests[request].output_limit or 0
            scene.progress(request, min(limit, scheduler.attempts[request].bill.tokens.output + step % 20))
        request = random.choice(list(scheduler.attempts))
        scene.finish(request, scene.requests[request].output_limit)
    return max(max(span) - min(span) for span in spans.values()), bound


@pytest.mark.parametrize("seed", range(4))
def test_service_at_full_price_stays_within_the_bound(seed: int) -> None:
    """Theorem 4.4: for two clients that always wait, at most 2 max(w_p L_input, w_q M) per weight."""
    drift, bound = drift_and_bound("vtc", seed)
    assert drift <= bound


def test_without_counters_the_bound_is_exceeded() -> None:
    """First come, first served lets the heaviest client gain without end, so the check above can fail."""
    drift, bound = drift_and_bound("rr+fcfs", seed=0)
    assert drift > bound


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "leave", "charge"]), st.integers(-2, 2)),
        min_size=20,
        max_size=60,
    )
)
def test_least_served_returns_the_lowest_counter(steps: list[tuple[str, str, int]]) -> None:
    """The lowest counter is found whatever rises, falls, joins and leaves; of equals, the first to wait; and the heap
    stays small.
    """
    counters, waiting = VirtualCounters(), dict[str, int]()
    values: dict[str, float] = {}
    last: str | None = None
    for number, (name, what, cost) in enumerate(steps):
        client = ClientId(name)
        if what == "join" and name not in waiting:
            values.setdefault(name, 0.0)
            level = min([values[other] for other in waiting], default=values[name] if last is None else values[last])
            values[name] = max(values[name], level)
            counters.set_weight(client, 1.0)
            counters.join(client)
            waiting[name] = number
        elif what == "leave" and name in waiting:
            counters.leave(client)
            del waiting[name]
            last = name
        elif what == "charge" and name in values:
            counters.charge(client, cost, 1.0)
            values[name] += cost
        least = min(waiting, key=lambda other: (values[other], waiting[other]), default=None)
        assert counters.least_served() == least
        assert all(counters.value(ClientId(other)) == value for other, value in values.items())


def test_the_heap_does_not_grow_with_refunds() -> None:
    """A client that always waits and whose estimates are always too high leaves no stale entries behind."""
    counters = VirtualCounters()
    for client in map(ClientId, "abc"):
        counters.set_weight(client, 1.0)
        counters.join(client)
    for client in map(ClientId, "ab"):
        counters.charge(client, 1000.0, 1.0)
    counters.charge(ClientId("c"), 100.0, 1.0)
    for _ in range(100):
        counters.charge(ClientId("c"), -1.0, 1.0)
        counters.charge(ClientId("c"), 1.0, 1.0)
        assert counters.least_served() == "c"
    assert len(counters) <= 7


def test_vtc_forgets_counters_that_would_be_lifted_anyway() -> None:
    """Counters at or above the current level are kept."""
    counters = VirtualCounters()
    for name, cost in (("low", 1.0), ("last", 5.0), ("high", 9.0)):
        client = ClientId(name)
        counters.set_weight(client, 1.0)
        counters.join(client)
        counters.charge(client, cost, 1.0)
        counters.leave(client)
    counters.join(ClientId("last"))
    counters.leave(ClientId("last"))
    counters.charge(ClientId("high"), 3.0, 1.0)
    for name in ("low", "last", "high"):
        counters.forget(ClientId(name))
    assert [counters.value(ClientId(name)) for name in ("low", "last", "high")] == [None, 15.0, 18.0]


def test_vtc_skips_the_heap_entry_of_a_forgotten_client() -> None:
    """A client that waited behind another one, left and was forgotten is skipped when the other one is served."""
    counters = VirtualCounters()
    first, dropped, last = clients = [ClientId(name) for name in ("first", "dropped", "last")]
    for client in clients:
        counters.set_weight(client, 1.0)
        counters.join(client)
    counters.leave(dropped)
    counters.leave(last)
    counters.forget(dropped)
    counters.charge(first, 5.0, 1.0)
    assert counters.least_served() == first
