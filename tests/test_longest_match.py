"""The queue by longest match, against matching everything anew at every question."""

from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scenario import CHUNK_TOKENS, MODEL, key

from router.core.estimates import Estimates
from router.core.longest_match import LongestMatchQueue
from router.core.model import ClientId, Request, RequestId, Usage, WorkerId
from router.core.prefix_map import PrefixMap
from router.core.prefix_tree import PrefixTree

HERE, THERE = WorkerId("here"), WorkerId("there")
CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]

texts = st.text("xy", max_size=6)


class WaitingAtOneWorker(RuleBasedStateMachine):
    """Requests come and go while the prefixes of their worker, and the worth of a chunk, change."""

    def __init__(self) -> None:
        super().__init__()
        self.estimates = Estimates()
        self.tree = PrefixTree(limit=16)
        self.map = PrefixMap(self.tree, self.estimates, minimum=0)
        self.queue = LongestMatchQueue(
            lambda request: self.map.watch(request, HERE), lambda request: self.map.unwatch(request, HERE)
        )
        self.waiting: dict[RequestId, Request] = {}
        self.arrivals = 0

    def matched(self, request: Request) -> int:
        return sum(self.tree.match(prompt.hashes).get(HERE, 0) for prompt in request.prompts)

    def naive(self, clients: Collection[ClientId]) -> Request | None:
        theirs = [request for request in self.waiting.values() if request.client in clients]
        return max(theirs, key=self.matched, default=None)  # of equals, max takes the first

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
        """A request leaves, and may come again under the same name."""
        request = data.draw(st.sampled_from(list(self.waiting)))
        removed = self.queue.remove(request)
        assert removed == self.waiting.pop(request)
        if again:
            self.queue.push(removed)
            self.waiting[request] = removed

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def longest(self, data: st.DataObject) -> None:
        present = list(self.queue.clients)
        clients = data.draw(st.lists(st.sampled_from(present), unique=True))
        assert self.queue.longest(clients) == self.naive(clients)

    @rule(worker=st.sampled_from([HERE, HERE, THERE]), prompt=texts)
    def insert(self, worker: WorkerId, prompt: str) -> None:
        grown = self.map.insert(MODEL, [key(prompt, exact=False)], worker, 0.0)
        if worker == HERE:
            self.queue.match_grew(grown)

    @rule(chunks=st.integers(1, 4))
    def evict(self, chunks: int) -> None:
        self.map.evict(HERE, chunks * CHUNK_TOKENS)

    @rule()
    def drop(self) -> None:
        self.map.drop(HERE)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=st.integers(1, 2000))
    def learn(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(list(self.waiting.values())))
        self.estimates.learn(request, Usage(tokens, 1))

    @invariant()
    def it_is_the_naive_queue(self) -> None:
        """The same request is first, the same wait in the same order, and each is watched once, unless it is alone."""
        present = list(dict.fromkeys(request.client for request in self.waiting.values()))
        assert set(self.queue.clients) == set(present)
        assert self.queue.longest(present) == self.naive(present)
        assert list(self.queue.requests) == list(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.map.watched == len(self.queue) or (len(self.queue) == 1 and not self.map.watched)
        self.map.check_integrity()


TestWaitingAtOneWorker = WaitingAtOneWorker.TestCase
TestWaitingAtOneWorker.settings = settings(max_examples=40)


class Cache:
    """A worker whose matches the test sets by hand, and that counts how often it is asked."""

    def __init__(self) -> None:
        self.matches: dict[RequestId, int] = {}
        self.questions = 0

    def watch(self, request: Request) -> int:
        self.questions += 1
        return self.matches.get(request.id, 0)

    def unwatch(self, request: RequestId) -> None:
        self.matches.pop(request, None)

    def queue(self) -> LongestMatchQueue:
        return LongestMatchQueue(self.watch, self.unwatch)


def request(client: str, number: int) -> Request:
    return Request(RequestId(f"{client}{number}"), ClientId(client), MODEL, ())


def test_a_choice_asks_about_one_request_however_many_wait() -> None:
    """While nothing is lost, only the head is matched anew."""
    cache = Cache()
    queue = cache.queue()
    for number in range(500):
        cache.matches[RequestId(f"ada{number}")] = number
        queue.push(request("ada", number))
    assert queue.longest([ClientId("ada")]) == request("ada", 499)
    cache.questions = 0
    assert queue.longest([ClientId("ada")]) == request("ada", 499)
    assert cache.questions == 1


def test_a_request_alone_is_matched_with_nothing() -> None:
    """There is no choice to make, so nothing is asked and nothing is watched."""
    cache = Cache()
    queue = cache.queue()
    queue.push(request("ada", 1))
    assert queue.longest([ClientId("ada")]) == queue.remove(RequestId("ada1"))
    assert cache.questions == 0


def test_a_lost_cache_is_found_out_once() -> None:
    """After a loss each request that it may concern is matched anew once; the next choice asks once again."""
    cache = Cache()
    queue = cache.queue()
    for number in range(100):
        cache.matches[RequestId(f"ada{number}")] = 1 + number
        queue.push(request("ada", number))
    cache.matches.clear()
    cache.questions = 0
    assert [queue.longest([ClientId("ada")]) for _ in range(2)] == [request("ada", 0)] * 2
    assert cache.questions <= 100 + 2


def test_nobody_is_chosen_from_nobody() -> None:
    """Without clients there is no request."""
    assert Cache().queue().longest([]) is None


def test_cancelled_requests_do_not_heap_up() -> None:
    """A client that always has one request waiting may send and take back others for ever."""
    queue = Cache().queue()
    queue.push(request("ada", 0))
    for number in range(1, 1000):
        queue.push(request("ada", number))
        queue.longest([ClientId("ada")])
        queue.remove(RequestId(f"ada{number}"))
    assert len(queue._heaps[ClientId("ada")]) < 10
