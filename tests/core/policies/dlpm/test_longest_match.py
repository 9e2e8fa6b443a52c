"""The queue by longest match equals one that matches everything anew at every choice."""

from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.cache.prefix_map import PrefixMap
from router.core.model.commands import PassedOver
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.core.policies.base import Turn
from router.core.policies.deficit.eligibility import ELIGIBLE, FRESH_AND_SPARSE, OVERDUE
from router.core.policies.dlpm.longest_match import LongestMatchQueue, longest
from router.core.policies.dlpm.queues_by_client import FEW_CHANGES, QueuesByClient
from router.core.predict.token_estimates import Estimates
from tests.core.scenario import CHUNK_TOKENS, MODEL, key

HERE, THERE = WorkerId("here"), WorkerId("there")
CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]

MAX_PASSES = 2
"""How often a request is passed over."""
EVERY = 3
"""In one of how many turns a client's oldest request goes."""

texts = st.text("xy", max_size=6)


class Ages:
    """The turns of each client since its oldest request was looked at, and which that was."""

    def __init__(self) -> None:
        self.turns: Counter[ClientId] = Counter()
        self.seen: dict[ClientId, RequestId] = {}

    def is_due(self, oldest: Request, waiting: int) -> bool:
        """Return whether a client's oldest request was its oldest at the last look, too, if it is time for one."""
        if self.turns[oldest.client] + 1 < max(EVERY, waiting):
            return False
        if self.seen.get(oldest.client) == oldest.id:
            return True
        self.seen[oldest.client] = oldest.id
        self.turns[oldest.client] = 0
        return False

    def count(self, client: ClientId, *, by_age: bool) -> None:
        self.turns[client] = 0 if by_age else self.turns[client] + 1

    def forget(self, client: ClientId) -> None:
        self.turns.pop(client, None)
        self.seen.pop(client, None)


class WaitingAtOneWorker(RuleBasedStateMachine):
    """Lets requests come and go while prefixes, priority classes, room and the token estimate of a chunk change."""

    def __init__(self) -> None:
        super().__init__()
        self.estimates = Estimates()
        self.map = PrefixMap(16, self.estimates, match_minimum=0)
        self.priority_class: dict[ClientId, int | None] = dict.fromkeys(CLIENTS, 0)
        self.queue = LongestMatchQueue(
            lambda request: self.map.watch_at(request, HERE),
            self.map.unwatch,
            self.priority_class.__getitem__,
            MAX_PASSES,
            EVERY,
        )
        self.waiting: dict[RequestId, Request] = {}
        self.passed: Counter[RequestId] = Counter()
        self.ages = Ages()
        self.arrivals = 0

    def matched(self, request: Request) -> int:
        return sum(self.map.tree.match(prompt.hashes).get(HERE, 0) for prompt in request.prompts)

    def naive(self, fits: Collection[RequestId]) -> Turn | None:
        """Choose by matching everything anew: one eligible request per client in order, until one fits. Counts turns,
        as the queue does, unless a request is alone.
        """
        ranked = sorted(self.waiting.values(), key=lambda request: -self.matched(request))
        passed: dict[ClientId, RequestId] = {}
        for priority_class in (0, 1):
            for request in ranked:
                if self.priority_class[request.client] != priority_class or request.client in passed:
                    continue
                own = [each for each in self.waiting.values() if each.client == request.client]
                oldest = own[0]
                by_age = len(self.waiting) > 1 and self.ages.is_due(oldest, len(own)) and oldest.id in fits
                if by_age or request.id in fits:
                    if len(self.waiting) > 1:
                        self.ages.count(request.client, by_age=by_age)
                    return Turn(
                        oldest if by_age else request,
                        tuple(PassedOver(late, "did not fit") for late in passed.values()),
                    )
                if self.passed[request.id] >= MAX_PASSES and len(self.waiting) > 1:
                    return None
                passed[request.client] = request.id
        return None

    @rule(client=st.sampled_from(CLIENTS), prompts=st.lists(texts, min_size=1, max_size=2))
    def push(self, client: ClientId, prompts: list[str]) -> None:
        self.arrivals += 1
        keys = tuple(key(prompt, exact=False) for prompt in prompts)
        request = Request(RequestId(f"r{self.arrivals}"), client, MODEL, keys)
        self.waiting[request.id] = request
        self.queue.push(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), again=st.booleans())
    def remove(self, data: st.DataObject, again: bool) -> None:
        """Remove a request, which may be pushed again with the same id."""
        request = data.draw(st.sampled_from(list(self.waiting)))
        removed = self.queue.remove(request)
        del self.passed[request]
        assert removed == self.waiting.pop(request)
        if removed.client not in {other.client for other in self.waiting.values()}:
            self.ages.forget(removed.client)
        if again:
            self.queue.push(removed)
            self.waiting[request] = removed

    @rule(client=st.sampled_from(CLIENTS), priority_class=st.sampled_from([None, 0, 1]))
    def change_priority(self, client: ClientId, priority_class: int | None) -> None:
        self.priority_class[client] = priority_class
        self.queue.update_priority(client, self.priority_class[client])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def little_room(self, data: st.DataObject) -> None:
        """Offer room that a request does not fit: it is passed over, and this is counted."""
        fits = data.draw(st.sets(st.sampled_from(list(self.waiting))))
        expected = self.naive(fits)
        assert self.queue.longest(lambda request: request.id in fits) == expected
        self.passed.update([late.request for late in expected.passed] if expected else ())

    @rule(worker=st.sampled_from([HERE, HERE, THERE]), prompt=texts)
    def insert(self, worker: WorkerId, prompt: str) -> None:
        self.map.insert(MODEL, [key(prompt, exact=False)], worker, 0.0)
        self.report_changes()

    @rule(chunks=st.integers(1, 4))
    def evict(self, chunks: int) -> None:
        self.map.mirror.evict(HERE, chunks * CHUNK_TOKENS)
        self.report_changes()

    @rule()
    def drop(self) -> None:
        self.map.drop(HERE)
        self.report_changes()

    def report_changes(self) -> None:
        self.queue.match_changed(self.map.take_changes().get(HERE, ()))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=st.integers(1, 2000))
    def learn(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(list(self.waiting.values())))
        self.estimates.learn(request, Usage(tokens, 1))

    @invariant()
    def it_equals_the_naive_queue(self) -> None:
        """The first request and the order of arrival are the same, and each request is watched once, unless it is
        alone.
        """
        assert self.queue.longest(lambda _: True) == self.naive(self.waiting.keys())
        assert list(self.queue.requests) == list(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.map.watched == len(self.queue) or (len(self.queue) == 1 and not self.map.watched)
        self.map.check_integrity()


TestWaitingAtOneWorker = WaitingAtOneWorker.TestCase
TestWaitingAtOneWorker.settings = settings(max_examples=80)


class Cache:
    """Stands for a worker whose matches the test sets, and counts the queries."""

    def __init__(self) -> None:
        self.matches: dict[RequestId, int] = {}
        self.questions = 0

    def watch(self, request: Request) -> int:
        self.questions += 1
        return self.matches.get(request.id, 0)

    def unwatch(self, request: RequestId) -> None:
        self.matches.pop(request, None)

    def queue(self) -> LongestMatchQueue:
        return LongestMatchQueue(self.watch, self.unwatch, lambda _: 0)


def anything(_: Request) -> bool:
    return True


def request(client: str, number: int) -> Request:
    return Request(RequestId(f"{client}{number}"), ClientId(client), MODEL, ())


def test_a_choice_without_changes_queries_no_match() -> None:
    """While no match changes, each is queried once."""
    cache = Cache()
    queue = cache.queue()
    for number in range(500):
        cache.matches[RequestId(f"ada{number}")] = number
        queue.push(request("ada", number))
    assert queue.longest(anything) == Turn(request("ada", 499))
    cache.questions = 0
    assert queue.longest(anything) == Turn(request("ada", 499))
    assert cache.questions == 0


def test_a_request_alone_is_not_matched() -> None:
    """There is no choice to make for a request alone, so nothing is queried and nothing is watched."""
    cache = Cache()
    queue = cache.queue()
    queue.push(request("ada", 1))
    assert queue.longest(anything) == Turn(queue.remove(RequestId("ada1")))
    assert cache.questions == 0


def test_a_request_alone_that_does_not_fit_waits() -> None:
    """A request alone stays in the queue if it does not fit."""
    queue = Cache().queue()
    queue.push(request("ada", 1))
    assert queue.longest(lambda _: False) is None
    assert len(queue) == 1


def test_cancelled_requests_do_not_accumulate() -> None:
    """A client that always has one request waiting may send and cancel others without end."""
    queue = Cache().queue()
    queue.push(request("ada", 0))
    for number in range(1, 1000):
        queue.push(request("ada", number))
        queue.longest(anything)
        queue.remove(RequestId(f"ada{number}"))
    assert len(queue._client_queues[ClientId("ada")].ranks) < 10
    assert len(queue._client_queues[ClientId("ada")]._order) < 30
    assert len(queue._firsts[0]) < 30


def test_clients_that_come_and_go_do_not_accumulate() -> None:
    """Nothing is kept of a client without waiting requests, whether it was set aside for its priority class or never
    found.
    """
    priority_class: dict[ClientId, int | None] = {ClientId("stays"): 0}
    queue = LongestMatchQueue(lambda _: 0, lambda _: None, priority_class.get)
    queue.push(request("stays", 0))
    for number in range(200):
        client = f"guest {number}"
        queue.push(request(client, 1))
        queue.push(request(client, 2))
        priority_class[ClientId(client)] = (None, 0, 1)[number % 3]
        queue.update_priority(ClientId(client), priority_class[ClientId(client)])
        queue.longest(anything)
        queue.remove(request(client, 1).id)
        queue.remove(request(client, 2).id)
    assert list(queue._client_queues) == ["stays"]
    assert len(queue.by_client) == 1
    assert all(len(firsts) < 30 for firsts in queue._firsts)


def test_a_changing_priority_class_costs_nothing_while_others_are_first() -> None:
    """A client that is far from its turn is not looked at, however its class changes."""
    priority_class: dict[ClientId, int | None] = {}
    asked: Counter[ClientId] = Counter()

    def priority_class_of(client: ClientId) -> int | None:
        asked[client] += 1
        return priority_class[client]

    queue = LongestMatchQueue(lambda _: 0, lambda _: None, priority_class_of)
    for number in range(100):
        priority_class[ClientId(f"client {number}-")] = 0
        queue.push(request(f"client {number}-", 1))
    queue.longest(anything)
    asked.clear()
    for number in range(1, 100):
        for each in (1, None, 0, 1):
            priority_class[ClientId(f"client {number}-")] = each
            queue.update_priority(ClientId(f"client {number}-"), each)
    assert queue.longest(anything) == Turn(request("client 0-", 1))
    assert asked == {"client 0-": 1}
    assert len(queue._firsts[0]) == 100


def test_a_look_is_kept_while_nothing_changes_here() -> None:
    """A look after changes that concern no client of the queue goes through no client."""
    asked: list[ClientId] = []

    def priority_class_of(client: ClientId) -> int:
        asked.append(client)
        return 0

    queue = LongestMatchQueue(lambda _: 0, lambda _: None, priority_class_of)
    for client in CLIENTS:
        queue.push(request(client, 1))
    assert queue.longest(anything) == Turn(request("ada", 1))
    asked.clear()
    queue.update_priority(ClientId("elsewhere"), 1)
    assert queue.longest(anything) == Turn(request("ada", 1))
    assert not asked


def test_an_empty_queue_keeps_no_request() -> None:
    """What was found of requests goes when the last of them does."""
    queue = LongestMatchQueue(lambda _: 0, lambda _: None, lambda _: 0)
    for client in CLIENTS:
        queue.push(request(client, 1))
    assert queue.longest(lambda _: False) is None
    assert len(queue._leaders) == len(queue._firsts[0]) == len(CLIENTS)
    for client in CLIENTS:
        queue.remove(request(client, 1).id)
    assert not queue._leaders
    assert not any(queue._firsts)


class QueuePair:
    """Lets requests wait in one or both of two queues, with a match in each."""

    def __init__(self) -> None:
        self.priority_class: dict[ClientId, int | None] = dict.fromkeys(CLIENTS, 0)
        self.matches: tuple[dict[RequestId, int], ...] = ({}, {})
        """By queue, in order of arrival there."""
        self.ages = Ages()
        by_client = QueuesByClient()
        self.queues = [
            LongestMatchQueue(
                lambda each, matched=matched: matched[each.id],  # type: ignore[misc]
                lambda _: None,
                self.priority_class.__getitem__,
                oldest_every=EVERY,
                by_client=by_client,
            )
            for matched in self.matches
        ]

    def client(self, name: RequestId) -> ClientId:
        return CLIENTS[int(name[1:]) % len(CLIENTS)]

    def push(self, n: int, name: RequestId, match: int) -> None:
        if name not in self.queues[n]:
            self.matches[n][name] = match
            self.queues[n].push(Request(name, self.client(name), MODEL, ()), arrival=int(name[1:]))

    def remove(self, n: int, name: RequestId) -> None:
        if name in self.queues[n]:
            self.queues[n].remove(name)
            del self.matches[n][name]
            if not any(self.client(name) in map(self.client, matched) for matched in self.matches):
                self.ages.forget(self.client(name))

    def rematch(self, n: int, name: RequestId, match: int) -> None:
        if name in self.queues[n]:
            self.matches[n][name] = match
            self.queues[n].match_changed([name])

    def change_priority(self, client: ClientId, priority_class: int | None) -> None:
        self.priority_class[client] = priority_class
        for queue in self.queues:
            queue.update_priority(client, self.priority_class[client])

    def naive(self) -> RequestId | None:
        ranked = [
            (priority_class, -match, int(name[1:]), n, name)
            for n, matched in enumerate(self.matches)
            for name, match in matched.items()
            if (priority_class := self.priority_class[self.client(name)]) is not None
        ]
        if not ranked:
            return None
        *_, first = min(ranked)
        client = self.client(first)
        own = [name for matched in self.matches for name in matched if self.client(name) == client]
        oldest = min(own, key=lambda name: int(name[1:]))
        by_age = self.ages.is_due(Request(oldest, client, MODEL, ()), len(own))
        self.ages.count(client, by_age=by_age)
        return oldest if by_age else first


PAIR_STEPS = st.tuples(
    st.sampled_from(["push", "push", "push", "remove", "rematch", "restand", "ask", "ask"]),
    st.integers(0, 11),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([(0,), (1,), (0, 1)]),
)


BOTH, FIRST = (0, 1), (0,)
OLDEST_OF_BOTH = [
    ("push", 0, 0, FIRST),
    ("push", 3, 2, (1,)),
    *[("ask", 0, 0, FIRST)] * 2 * EVERY,
]


@settings(max_examples=150)
@example(steps=OLDEST_OF_BOTH)
@given(steps=st.lists(PAIR_STEPS, max_size=60))
def test_the_first_request_of_two_queues_goes(steps: list[tuple[str, int, int, tuple[int, ...]]]) -> None:
    """A request may wait in both, with a different match in each; of equals the first queue's goes. Now and then the
    oldest of its client in both goes.
    """
    pair = QueuePair()
    for step, number, value, places in steps:
        name = RequestId(f"r{number}")
        match step:
            case "restand":
                pair.change_priority(pair.client(name), (None, 0, 1)[value])
            case "ask":
                turn = longest(pair.queues, anything)
                assert (turn and turn.request.id) == pair.naive()
        for n in places:
            match step:
                case "push":
                    pair.push(n, name, value)
                case "remove":
                    pair.remove(n, name)
                case "rematch":
                    pair.rematch(n, name, value)


LOOK_STEPS = st.tuples(
    st.sampled_from(["push", "push", "push", "remove", "rematch", "class", "turn", "look", "look"]),
    st.integers(0, 11),
    st.integers(-1, 2),
)


class Looks:
    """Two queues that are looked through while clients take turns, and what waits in them."""

    def __init__(self, *, in_rounds: bool) -> None:
        """`in_rounds`: within a round, clients whose request has a match go first."""
        self.in_rounds = in_rounds
        self.rounds = dict.fromkeys(CLIENTS, 0)
        self.classes: dict[ClientId, int | None] = dict.fromkeys(CLIENTS, OVERDUE)
        self.turns = {client: turn for turn, client in enumerate(CLIENTS)}
        self.clock = 0
        self.matches: tuple[dict[RequestId, int], ...] = ({}, {})
        self.by_client = QueuesByClient()
        self.queues = self.new_queues(self.by_client)

    def new_queues(self, by_client: QueuesByClient) -> list[LongestMatchQueue]:
        return [
            LongestMatchQueue(
                lambda each, matched=matched: matched[each.id],  # type: ignore[misc]
                lambda _: None,
                self.classes.__getitem__,
                turns=self,
                by_client=by_client,
            )
            for matched in self.matches
        ]

    def last_turn(self, client: ClientId) -> int:
        return self.turns[client]

    def turn(self, request: Request, unmatched: int) -> int:
        turn = self.turns[request.client]
        return (2 * self.rounds[request.client] + (unmatched >= 0)) * 1000 + turn if self.in_rounds else turn

    def request(self, name: RequestId) -> Request:
        return Request(name, CLIENTS[int(name[1:]) % len(CLIENTS)], MODEL, ())

    def apply(self, step: str, number: int, value: int) -> None:
        name, queue, matched = RequestId(f"r{number}"), self.queues[number % 2], self.matches[number % 2]
        client = self.request(name).client
        match step:
            case "push" if name not in matched:
                matched[name] = value
                queue.push(self.request(name), arrival=number)
            case "remove" if name in matched:
                queue.remove(name)
                del matched[name]
            case "rematch" if name in matched:
                matched[name] = value
                queue.match_changed([name])
            case "class":
                self.classes[client] = (OVERDUE, FRESH_AND_SPARSE, None, ELIGIBLE)[value + 1]
                self.by_client.update_priority(client, self.classes[client])
            case "turn":
                self.turns[client] = max(self.turns.values()) + 1
                self.rounds[client] += 1
                self.clock += 1

    def looked_at(self, queues: list[LongestMatchQueue]) -> list[RequestId]:
        """Return all that is looked at while nothing fits."""
        found: list[RequestId] = []

        def fits(request: Request) -> bool:
            found.append(request.id)
            return False

        assert longest(queues, fits) is None
        return found

    def looked_at_anew(self) -> list[RequestId]:
        """Return the same of new queues, of which nothing is known."""
        queues = self.new_queues(QueuesByClient())
        for queue, matched in zip(queues, self.matches, strict=True):
            for name in matched:
                queue.push(self.request(name), arrival=int(name[1:]))
        return self.looked_at(queues)


TWO_CLIENTS_SEEN = [("push", 0, 0), ("push", 4, 0), ("look", 0, 0)]
"""Ada, whose last turn is 0, is before Bob in the first queue."""
A_TURN = [*TWO_CLIENTS_SEEN, ("turn", 0, 0), ("look", 0, 0)]
ANOTHER_AFTER_A_TURN = [*A_TURN, ("turn", 2, 0), ("turn", 4, 0), ("push", 2, 0), ("look", 0, 0)]
"""Ada's turn was found to be later than it had been. Cyd, whose turn is later still, comes, and Ada goes first."""
MANY_CHANGES = [*TWO_CLIENTS_SEEN, ("class", 0, 1), *[("class", 2, 0)] * 3 * FEW_CHANGES, ("look", 0, 0)]
"""Ada is not eligible any more, and after that another client's class changes so often that hers is not noted."""


@pytest.mark.parametrize("in_rounds", [False, True])
@settings(max_examples=300)
@example(steps=A_TURN)
@example(steps=ANOTHER_AFTER_A_TURN)
@example(steps=MANY_CHANGES)
@given(steps=st.lists(LOOK_STEPS, max_size=40))
def test_what_is_kept_of_a_look_is_what_a_new_look_finds(in_rounds: bool, steps: list[tuple[str, int, int]]) -> None:
    """Whatever changed since the last look, the next one goes through the queues as if they were new."""
    looks = Looks(in_rounds=in_rounds)
    for step, number, value in steps:
        looks.apply(step, number, value)
        if step == "look":
            assert looks.looked_at(looks.queues) == looks.looked_at_anew()
