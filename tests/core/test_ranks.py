"""Ranks behind one URL in the core: who takes which calls, and that a group is in service or out of it as one."""

import pytest

from router.core.fleet.health import HealthRules
from router.core.model.commands import Refusal
from router.core.model.events import Arrived, Fault, Returned, WorkerAnswered, WorkerJoined
from router.core.model.request import BarrierId, ClientId, Request, RequestId, Takes, Worker, WorkerId
from router.core.policies.registry import POOLED
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import MODEL, ONE_AT_A_TIME, Scene, key

POLICIES = (*(name for name in POOLED if name != "brh"), "d2lpm", "rr+fcfs", "least_requests+vtc", "preble")
RANKS = ("url@0", "url@1")


class Ranks(Scene):
    """Two ranks that step together, and their URL as a whole."""

    def __init__(self, policy: str, settings: SchedulerSettings = ONE_AT_A_TIME) -> None:
        super().__init__(policy, workers=(), settings=settings)
        for rank, name in enumerate(RANKS):
            self.add(name, Takes.PINNED, rank, "url")
        self.add("url", Takes.UNPINNED)

    def add(self, name: str, takes: Takes = Takes.ALL, rank: int | None = None, barrier: str | None = None) -> None:
        group = None if barrier is None else BarrierId(barrier)
        worker = Worker(WorkerId(name), frozenset({MODEL}), rank=rank, barrier=group, takes=takes)
        self.feed(WorkerJoined(worker))

    def send(self, *, pinned: bool = True, only: str | None = None) -> RequestId:
        """Let a client send a call, which can name its rank or not; `only`: as in `arrive`."""
        name = RequestId(f"r{len(self.requests)}")
        worker = None if only is None else WorkerId(only)
        self.requests[name] = Request(name, ClientId("ann"), MODEL, (key("a"),), 1, pinned=pinned, worker=worker)
        self.feed(Arrived(self.requests[name]))
        return name


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_go_to_ranks_if_they_can_name_one_and_to_the_url_if_not(policy: str) -> None:
    """Neither waits for the other's workers, and none takes the other's place."""
    scene = Ranks(policy)
    named = [scene.send() for _ in range(3)]
    unnamed = [scene.send(pinned=False) for _ in range(2)]
    assert {scene.worker_of(each) for each in named[:2]} == set(RANKS)
    assert scene.worker_of(unnamed[0]) == "url"
    assert len(scene.order) == 3
    scene.serve(unnamed[0])
    assert scene.worker_of(unnamed[1]) == "url"
    scene.serve(named[0])
    assert scene.worker_of(named[2]) == scene.worker_of(named[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_that_waits_is_refused_when_a_url_turns_into_ranks_and_back(policy: str) -> None:
    """The ranks join before their URL takes less, so a call that waits goes to one of them, and the other way round."""
    scene = Ranks.__new__(Ranks)
    Scene.__init__(scene, policy, workers=(), settings=ONE_AT_A_TIME)
    scene.add("url")
    running, waiting = scene.send(), scene.send()
    for rank, name in enumerate(RANKS):
        scene.add(name, Takes.PINNED, rank, "url")
    scene.add("url", Takes.UNPINNED)
    assert scene.worker_of(waiting) in RANKS
    more = [scene.send() for _ in range(2)]
    scene.add("url")
    for name in RANKS:
        scene.leave(name)
    scene.serve(running)
    scene.serve_all()
    assert not scene.refusals
    assert set(more) <= set(scene.order)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_without_ranks_takes_both(policy: str) -> None:
    """Beside ranks, a plain worker serves whatever comes; without it, and without the URL, nobody takes the unnamed."""
    scene = Ranks(policy)
    scene.leave("url")
    assert scene.refusals == {scene.send(pinned=False): Refusal.NO_WORKER}
    scene.add("plain")
    unnamed = scene.send(pinned=False)
    assert scene.worker_of(unnamed) == "plain"
    named = [scene.send() for _ in range(2)]
    scene.serve(unnamed)
    named.append(scene.send())
    assert {scene.worker_of(each) for each in named} == {"plain", *RANKS}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_stored_at_the_url_goes_on_there(policy: str) -> None:
    """A call that only the URL as a whole may serve is sent there."""
    scene = Ranks(policy)
    assert scene.worker_of(scene.send(pinned=False, only="url")) == "url"


def test_calls_for_a_url_as_a_whole_count_on_no_rank() -> None:
    """The ranks' contexts are those of the calls that name them."""
    scene = Ranks("dlpm_balance")
    scene.send(pinned=False)
    fleet = scene.scheduler.fleet
    assert [fleet[WorkerId(rank)].context_tokens for rank in RANKS] == [0, 0]
    named = scene.send()
    assert fleet[scene.worker_of(named)].context_tokens == 32


def test_the_bound_of_a_pool_is_not_claimed_once_some_calls_have_other_workers() -> None:
    """While all calls name ranks, all workers serve the same; with the first that does not, they differ."""
    scene = Ranks("dlpm_home")
    scene.send()
    assert scene.scheduler.fleet.alike
    scene.send(pinned=False)
    assert not scene.scheduler.fleet.alike


RULES = SchedulerSettings(health=HealthRules(failures=2, cooldown=10.0))


def test_a_rank_with_an_open_breaker_takes_its_group_along() -> None:
    """Both ranks are ejected when one has failed often enough, and come back together."""
    scene = Ranks("rr+fcfs", RULES)
    scene.add("plain")
    for _ in range(20):
        request = scene.send()
        if scene.worker_of(request) == "url@0":
            scene.feed(Returned(request, True, Fault.BROKEN, None))
        if not scene.scheduler.fleet.in_use(WorkerId("url@0")):
            break
        scene.now += 0.1
        for running in list(scene.scheduler.attempts):
            scene.serve(running)
    fleet = scene.scheduler.fleet
    assert [fleet.in_use(WorkerId(each)) for each in (*RANKS, "url", "plain")] == [False, False, True, True]
    assert {scene.worker_of(scene.send()) for _ in range(4)} == {"plain"}
    scene.wait(20.0)
    assert all(fleet.in_use(WorkerId(rank)) for rank in RANKS)


def test_a_group_that_cannot_be_spared_stays_in_service() -> None:
    """Without another worker for their calls, ranks are not ejected, as no other worker is."""
    scene = Ranks("rr+fcfs", RULES)
    for _ in range(12):
        scene.feed(Returned(scene.send(), True, Fault.BROKEN, None))
    assert all(scene.scheduler.fleet.in_use(WorkerId(rank)) for rank in RANKS)


def test_a_silent_rank_takes_its_group_along_until_it_answers() -> None:
    """While one rank sends nothing, none of its group is sent anything; the scheduler is not woken in vain."""
    scene = Ranks("rr+fcfs", SchedulerSettings(health=HealthRules(silence=5.0)))
    scene.add("plain")
    names = {WorkerId(name) for name in (*RANKS, "plain")}
    sent: dict[WorkerId, RequestId] = {}
    while sent.keys() != names:
        request = scene.send()
        sent[scene.worker_of(request)] = request
    for _ in range(10):
        scene.wait(1.0)
        for answering in ("url@1", "plain"):
            scene.feed(WorkerAnswered(WorkerId(answering)))
    fleet = scene.scheduler.fleet
    assert [fleet.in_use(WorkerId(each)) for each in (*RANKS, "plain")] == [False, False, True]
    assert scene.wake_at is None or scene.wake_at > scene.now
    scene.feed(WorkerAnswered(WorkerId("url@0")))
    assert all(fleet.in_use(WorkerId(rank)) for rank in RANKS)
