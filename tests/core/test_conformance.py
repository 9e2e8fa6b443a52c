"""Every policy in the registry keeps these guarantees, whatever happens in whatever order."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command, Dispatch, Refusal, Reject, WakeAt
from router.core.model.cost import Tokens
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Failed,
    Fault,
    Finished,
    FrontAway,
    FrontBack,
    Progressed,
    Returned,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from router.core.model.prompt_key import PromptKey
from router.core.model.request import BarrierId, ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.balance.balance_parameters import Br0Parameters, BrhParameters, DlpmBalanceParameters
from router.core.policies.context import Parameters
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters, DlpmParameters, LpmParameters
from router.core.policies.preble.preble_parameters import PrebleParameters, PriorityGroupsParameters
from router.core.policies.registry import POLICIES
from router.core.policies.simple.simple_parameters import CacheAwareParameters, ConsistentHashParameters, RpmParameters
from router.core.policies.vtc.vtc_parameters import OracleParameters
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene, key

ROOT = Path(__file__).parents[2]
NAMES = sorted({factory: name for name, factory in POLICIES.items()}.values())
"""One name of each policy."""
JOINED_ONCE = {"d2lpm+dlpm", "client_rr+vtc", "consistent_hash+lpm"}
"""Beside each placement with first come, first served, and each order with round robin."""
WORKERS = [WorkerId(name) for name in ("w1", "w2", "w3")]
MODELS = ("llama", "qwen")
WEIGHTS = {"ada": 1.0, "bob": 2.0, "cyd": 0.5}
WINDOW = FixedWindow(requests=3, unstarted_tokens=160)
TIGHT = SchedulerSettings(
    waiting=WaitingLimits(requests=8, time_to_live=10.0),
    window=WINDOW,
    prefix_limit=24,
    match_minimum=CHUNK_TOKENS,
    kv_tokens=12 * CHUNK_TOKENS,
    cached_in_flight=4 * CHUNK_TOKENS,
    health=HealthRules(failures=2, cooldown=3.0, tries=3, budget=0.5, floor=2),
)
"""Every limit so small that it is met."""
PARAMETERS = Parameters(
    DlpmParameters(quantum=100.0, patience=2),
    D2lpmParameters(quantum=300.0, load_slack=1, steal_loss=CHUNK_TOKENS),
    DlpmHomeParameters(quantum=100.0, worker_quantum=300.0, home_loss=CHUNK_TOKENS, patience=2),
    LpmParameters(cut_off=3),
    ConsistentHashParameters(prefix_chunks=1, load_factor=1.25),
    CacheAwareParameters(balance_abs_threshold=1),
    PrebleParameters(history=20.0, decode_ratio=0.3, balance_ratio=1.1, balance_after=1, copy_slowdown=1.1),
    PriorityGroupsParameters(groups=3),
    RpmParameters(limit=2),
    OracleParameters(error=0.5),
    Br0Parameters(candidates=3, threshold=2, fill_candidates=2, subset=2),
    BrhParameters(candidates=3, threshold=4, subset=3, horizon=6, refresh=3),
    DlpmBalanceParameters(quantum=100.0, worker_quantum=300.0, home_loss=CHUNK_TOKENS, patience=2, candidates=3),
)

prompts = st.lists(st.text("xy", max_size=5), min_size=1, max_size=2)
barriers = st.sampled_from([None, BarrierId("rack"), BarrierId("pod")])
model_sets = st.sets(st.sampled_from(MODELS), min_size=1).map(frozenset)


def examples(policy: str) -> int:
    """Return how many examples to try. Placement and order hardly interact, so pairs get fewer than single policies."""
    placement, _, order = policy.partition("+")
    return 40 if placement == "rr" or order in ("", "fcfs") or policy in JOINED_ONCE else 5


def build(policy: str) -> Scheduler:
    return Scheduler(POLICIES[policy], TIGHT, PARAMETERS, Random(0))


@dataclass
class Running:
    """A dispatched request, as its engine and its front know it."""

    request: Request
    worker: WorkerId
    input_tokens: int
    uncached: int
    resumed: int = 0
    """Output tokens of the whole answer that were sent along with the prompt."""
    output: int = 0
    failed: tuple[WorkerId, ...] = ()
    started: bool = False
    front_away: bool = False
    """Whether its worker has room as if it did not have this request."""

    @property
    def unstarted(self) -> bool:
        """Whether the request certainly fills the window; when other requests start is only estimated."""
        return self.request.streamed and not self.started


class Fleet(RuleBasedStateMachine):
    """A front and engines that do anything and keep their own books about the scheduler's commands."""

    policy: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = build(self.policy)
        self.now = 0.0
        self.arrivals = 0
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Running] = {}
        self.back: dict[RequestId, Running] = {}
        """What came back from a worker, as it was there."""
        self.ended: list[RequestId] = [RequestId("unknown")]
        self.workers: dict[WorkerId, Worker] = {}
        self.history: list[tuple[Event, float, list[Command]]] = []

    def feed(self, event: Event) -> list[Command]:
        commands = self.scheduler.handle(event, self.now)
        self.history.append((event, self.now, commands))
        for command in commands:
            match command:
                case Dispatch():
                    self.dispatch(command)
                case Reject(request):
                    del (self.back if request in self.back else self.waiting)[request]
                    self.ended.append(request)
                case WakeAt(time):
                    assert time >= self.now
        return commands

    def dispatch(self, command: Dispatch) -> None:
        before = self.back.pop(command.request, None)
        request = self.waiting.pop(command.request) if before is None else before.request
        failed, output = (before.failed, before.output) if before else ((), 0)
        assert request.model in self.workers[command.worker].models
        assert request.worker in (None, command.worker)
        assert command.worker not in failed
        assert command.worker not in self.scheduler.fleet.ejected
        size = self.scheduler.estimates.input_tokens(request) + output
        assert 0 <= command.cached_tokens < size
        uncached = size - command.cached_tokens
        there = self.counted_at(command.worker)
        unstarted = [running.uncached for running in there if running.unstarted]
        assert len(there) < WINDOW.requests
        assert not unstarted or sum(unstarted) + uncached <= WINDOW.unstarted_tokens
        self.running[request.id] = Running(request, command.worker, size, uncached, output, output, failed)

    def counted_at(self, worker: WorkerId) -> list[Running]:
        """Return the requests that take room at a worker."""
        return [each for each in self.running.values() if each.worker == worker and not each.front_away]

    def end(self, request: RequestId) -> None:
        self.waiting.pop(request, None)
        self.running.pop(request, None)
        self.back.pop(request, None)
        self.ended.append(request)

    def any_of(self, data: st.DataObject, requests: Mapping[RequestId, object]) -> RequestId:
        return data.draw(st.sampled_from(list(requests)))

    def usage(self, data: st.DataObject, request: RequestId) -> Usage:
        running = self.running[request]
        cached = data.draw(st.none() | st.integers(0, running.input_tokens))
        output = running.output + data.draw(st.integers(0, 20))
        return Usage(running.input_tokens + data.draw(st.sampled_from([0, 0, 7])), output, cached)

    @initialize(models=model_sets, barrier=barriers)
    def begin(self, models: frozenset[str], barrier: BarrierId | None) -> None:
        self.join(WORKERS[0], models, barrier)

    @rule(worker=st.sampled_from(WORKERS), models=model_sets, barrier=barriers)
    def join(self, worker: WorkerId, models: frozenset[str], barrier: BarrierId | None) -> None:
        self.workers[worker] = Worker(worker, models, barrier=barrier)
        self.feed(WorkerJoined(self.workers[worker]))

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: WorkerId) -> None:
        self.workers.pop(worker, None)
        commands = self.feed(WorkerLeft(worker))
        refused = [command.reason for command in commands if isinstance(command, Reject)]
        assert set(refused) <= {Refusal.NO_WORKER, Refusal.NO_RETRY}

    @rule(
        worker=st.sampled_from(WORKERS), counts=st.tuples(*[st.integers(0, 9)] * 2), kv=st.sampled_from([None, 99, 999])
    )
    def report(self, worker: WorkerId, counts: tuple[int, int], kv: int | None) -> None:
        self.feed(WorkerReported(worker, *counts, kv))

    @rule(worker=st.sampled_from(WORKERS), tokens=st.none() | st.integers(0, 300))
    def evict(self, worker: WorkerId, tokens: int | None) -> None:
        self.feed(Evicted(worker, tokens))

    @rule(
        client=st.sampled_from(list(WEIGHTS)),
        texts=prompts,
        exact=st.booleans(),
        model=st.sampled_from([*MODELS, "nobody's"]),
        limit=st.none() | st.integers(0, 20),
        streamed=st.sampled_from([True, True, False]),
        pin=st.sampled_from([None, None, *WORKERS]),
    )
    def arrive(
        self,
        client: str,
        texts: list[str],
        exact: bool,
        model: str,
        limit: int | None,
        streamed: bool,
        pin: WorkerId | None,
    ) -> None:
        self.arrivals += 1
        keys: tuple[PromptKey, ...] = tuple(key(text, exact=exact) for text in texts)
        request = Request(
            RequestId(f"r{self.arrivals}"), ClientId(client), model, keys, limit, streamed, WEIGHTS[client], worker=pin
        )
        full = len(self.waiting) >= TIGHT.waiting.requests
        in_use = self.scheduler.fleet.in_use
        able = [worker for worker in self.workers.values() if pin is None or (worker.id == pin and in_use(pin))]
        served = any(model in worker.models for worker in able) or self.scheduler.fleet.bound_comes_back(request)
        self.waiting[request.id] = request
        commands = self.feed(Arrived(request))
        refused = [command.request for command in commands if isinstance(command, Reject)]
        # A full queue keeps no worker from a request that it could serve at once. Otherwise a request is displaced.
        assert len(refused) == (not served or (full and request.id not in self.running))
        assert served or refused == [request.id]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        request = self.any_of(data, self.running)
        self.running[request].started = True
        self.feed(Started(request))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        grown = data.draw(st.lists(st.sampled_from(list(self.running)), min_size=1, unique=True))
        for request in grown:
            self.running[request].output += data.draw(st.integers(0, 9))
            self.running[request].started = True
        self.feed(Progressed({request: self.running[request].output for request in grown}))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reports_usage=st.booleans(), answers=st.lists(st.text("xy", max_size=8), max_size=2))
    def finish(self, data: st.DataObject, reports_usage: bool, answers: list[str]) -> None:
        request = self.any_of(data, self.running)
        usage = self.usage(data, request) if reports_usage else None
        self.end(request)
        self.feed(Finished(request, usage, tuple(key(answer) for answer in answers)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), accepted=st.booleans(), reports_usage=st.booleans(), fault=st.sampled_from(Fault))
    def fail(self, data: st.DataObject, accepted: bool, reports_usage: bool, fault: Fault) -> None:
        request = self.any_of(data, self.running)
        usage = self.usage(data, request) if reports_usage else None
        self.end(request)
        self.feed(Failed(request, accepted, usage, fault))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), accepted=st.booleans(), fault=st.sampled_from(Fault))
    def give_back(self, data: st.DataObject, accepted: bool, fault: Fault) -> None:
        """Let a worker return a request: it is dispatched to another one at once or later, or rejected."""
        request = self.any_of(data, self.running)
        running = self.back[request] = self.running.pop(request)
        if fault is not Fault.FULL:
            running.failed += (running.worker,)
        begun = running.output > 0
        paid = Usage(running.input_tokens, running.output, 0) if begun else None
        self.feed(Returned(request, accepted or begun, fault, paid, begun=begun))
        assert (request in self.ended) != (request in self.running or request in self.back)

    @precondition(lambda self: self.back)
    @rule(data=st.data())
    def cancel_back(self, data: st.DataObject) -> None:
        request = self.any_of(data, self.back)
        self.end(request)
        self.feed(Cancelled(request))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reports_usage=st.booleans())
    def cancel_running(self, data: st.DataObject, reports_usage: bool) -> None:
        request = self.any_of(data, self.running)
        usage = self.usage(data, request) if reports_usage else None
        self.end(request)
        self.feed(Cancelled(request, usage))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_front(self, data: st.DataObject) -> None:
        """The front of some requests is away; events about them may still be on their way."""
        gone = data.draw(st.lists(st.sampled_from(list(self.running)), min_size=1))
        for request in gone:
            self.running[request].front_away = True
        self.feed(FrontAway(tuple(gone)))

    @rule(data=st.data())
    def find_front(self, data: st.DataObject) -> None:
        away = [request for request, running in self.running.items() if running.front_away]
        for request in away:
            self.running[request].front_away = False
        self.feed(FrontBack((*away, data.draw(st.sampled_from(self.ended)))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        request = self.any_of(data, self.waiting)
        self.end(request)
        self.feed(Cancelled(request))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def events_about_a_waiting_request(self, data: st.DataObject) -> None:
        """Only its client can end a waiting request: other events about it are ignored."""
        request = self.any_of(data, self.waiting)
        for event in (Started(request), Progressed({request: 5}), Finished(request), Failed(request, accepted=False)):
            assert not self.feed(event)

    @rule(data=st.data())
    def late_events(self, data: st.DataObject) -> None:
        """An event about an ended or unknown request changes nothing."""
        request = data.draw(st.sampled_from(self.ended))
        news: list[Event] = [
            Started(request),
            Progressed({request: 5}),
            Finished(request, Usage(9, 9, 9), (key("xyx"),)),
        ]
        news += [Failed(request, accepted=True), Failed(request, accepted=False), Cancelled(request)]
        news += [Returned(request, accepted=True, fault=Fault.BROKEN), Failed(request, True, fault=Fault.FULL)]
        assert not self.feed(data.draw(st.sampled_from(news)))

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Ticked())
        if seconds > TIGHT.waiting.time_to_live:
            assert not self.waiting
            assert not self.back

    @invariant()
    def books_agree(self) -> None:
        """The scheduler has the same requests as the front and the engines."""
        scheduler = self.scheduler
        backlogged = sum(map(scheduler.backlog.of_client, scheduler.weights))
        barred = [request for request in self.waiting.values() if request.worker in scheduler.fleet.ejected]
        assert backlogged == len(self.waiting) - len(barred)  # nobody can serve those that wait for an ejected worker
        assert scheduler.waiting == len(self.waiting) + len(self.back)
        assert scheduler.live == len(self.waiting) + len(self.back) + len(self.running)
        assert scheduler.attempts.keys() == self.running.keys()
        attempts = scheduler.attempts.values()
        assert {attempt.bill for attempt in attempts} == set(scheduler.ledger.bills)
        assert {attempt.run for attempt in attempts} == {
            run for cache in scheduler.mirror.caches.values() for run in cache.runs
        }
        assert {attempt.flight for attempt in attempts} == {
            flight for state in scheduler.fleet for flight in (*state.running, *state.in_flight.aside)
        }
        reserved = [bill.request for bill in scheduler.ledger.bills if not bill.started]
        unstarted = {request: it for request, it in self.running.items() if not it.started}
        assert len(reserved) == len(set(reserved))
        # An unstreamed answer may be estimated to have started, and is charged for output from then on.
        assert {request for request, it in unstarted.items() if it.request.streamed} <= set(reserved) <= {*unstarted}
        for state in scheduler.fleet:
            there = self.counted_at(state.worker.id)
            shown = [running.uncached for running in there if running.unstarted]
            silent = [running.uncached for running in there if not running.request.streamed]
            assert state.load.requests == len(there)
            assert len(shown) <= state.load.unstarted + state.load.guessed <= len(shown) + len(silent)
            assert sum(shown) <= state.load.unstarted_tokens <= sum(shown) + sum(silent)

    @invariant()
    def contexts_are_exact(self) -> None:
        """A worker's context tokens are the whole contexts of what is in flight there; a drained fleet has none."""
        attempts = self.scheduler.attempts
        for state in self.scheduler.fleet:
            there = {
                name: running
                for name, running in self.running.items()
                if running.worker == state.worker.id and not running.front_away
            }
            # The output of an unstreamed answer is estimated until it ends, and begins again after a retry.
            contexts = [
                running.input_tokens
                - running.resumed
                + (running.output if running.request.streamed else attempts[name].bill.tokens.output)
                for name, running in there.items()
            ]
            assert state.context_tokens == sum(contexts)

    @invariant()
    def totals_are_consistent(self) -> None:
        """Charges are conserved, and the tree and the index of watches are consistent."""
        self.scheduler.ledger.check_conservation()
        self.scheduler.prefixes.check_integrity()

    @invariant()
    def no_worker_idles(self) -> None:
        """No request waits for a worker that is not full and to which nothing is in flight.

        In a pool with locality a request may wait for another worker, for a known time.
        """
        policy = self.scheduler.policy
        assert policy.next(self.now) is None
        assert policy.next_deadline > self.now
        pooled = policy.properties.pooled and policy.next_deadline == inf
        for worker, facts in self.workers.items():
            state = self.scheduler.fleet[worker]
            load = state.load
            barred = worker in self.scheduler.fleet.ejected
            assert barred or state.health.trusted or load.requests, "nothing will ever show that it is well again"
            if load.requests < WINDOW.requests and not load.unstarted and state.has_room and not barred:
                assert policy.properties.pooled or not self.scheduler.backlog.length(worker)
                able = [r for r in self.waiting.values() if r.model in facts.models and r.worker in (None, worker)]
                assert not pooled or not able

    def teardown(self) -> None:
        """When all requests have ended, every count is 0, and the same history gives the same commands."""
        self.join(WORKERS[0], frozenset(MODELS), None)
        while self.running:
            request = next(iter(self.running))
            self.end(request)
            self.feed(Finished(request))
        # Requests that still wait have a deadline, or are rejected as expired.
        policy, fleet = self.scheduler.policy, self.scheduler.fleet
        deadlines = (policy.next_deadline, fleet.index.next_deadline, fleet.next_readmission)
        assert not self.waiting or min(deadlines) < inf
        assert not self.running
        self.now += 2 * TIGHT.waiting.time_to_live
        self.feed(Ticked())
        assert not self.waiting
        self.now += 2 * TIGHT.waiting.time_to_live
        assert not self.feed(Ticked())
        self.books_agree()
        assert not self.scheduler.prefixes.watched
        accounts = self.scheduler.ledger.accounts.values()
        assert all(account.reserved == Tokens() for account in accounts)
        again = build(self.policy)
        for event, now, commands in self.history:
            assert again.handle(event, now) == commands


@pytest.mark.parametrize("policy", NAMES)
def test_every_request_ends_once_and_leaves_nothing(policy: str) -> None:
    """In any order of events, each request is dispatched within the window and ends once, and every count returns to
    0.
    """

    class FleetOfPolicy(Fleet):
        pass

    FleetOfPolicy.policy = policy
    run_state_machine_as_test(FleetOfPolicy, settings=settings(max_examples=examples(policy), stateful_step_count=50))


@pytest.mark.parametrize("policy", NAMES)
def test_declared_locality_is_seen(policy: str) -> None:
    """Requests with a shared prefix, one after the other on an idle fleet, stay at one worker exactly if the policy
    declares locality.
    """
    scene = Scene(policy, workers=WORKERS)
    for letter in "abcdef":
        scene.serve(scene.arrive("ada", "document" + letter))
    homes = {scene.worker_of(request) for request in scene.order}
    assert (len(homes) == 1) == scene.scheduler.policy.properties.locality


@pytest.mark.parametrize("policy", NAMES)
def test_declared_work_conservation_is_seen(policy: str) -> None:
    """A worker that joins takes uncached requests that wait for another worker exactly if the policy declares to
    conserve work.
    """
    scene = Scene(policy, RpmParameters(limit=1), workers=WORKERS[:1], settings=ONE_AT_A_TIME)
    for letter in "abc":
        scene.arrive("ada", letter)
    scene.join("w2")
    assert (len(scene.order) == 2) == scene.scheduler.policy.properties.work_conserving


def history(policy: str) -> str:
    """Return the commands of a long fixed history."""
    scene = Scene(policy, DlpmParameters(200.0), D2lpmParameters(500.0), workers=WORKERS, settings=TIGHT)
    random = Random(7)
    for step in range(120):
        client = random.choice(["ada", "bob", "cyd", "dee"])
        scene.arrive(client, random.choice("xyz") * random.randint(1, 9) + client[0])
        if running := list(scene.scheduler.attempts):
            scene.serve(random.choice(running), step % 9)
        if step % 60 == 50:
            scene.leave(random.choice(WORKERS))
        elif step % 60 == 55:
            scene.join(random.choice(WORKERS))
    return repr((list(scene.dispatched.values()), scene.refusals))


@pytest.mark.parametrize("barrier", [None, BarrierId("rack")])
def test_without_a_group_the_balancing_default_serves_like_the_other(barrier: BarrierId | None) -> None:
    """On a random history, `dlpm_balance` with the parameters of `dlpm_home` gives its commands exactly if no workers
    step together.
    """
    parameters = (
        DlpmHomeParameters(quantum=100.0, worker_quantum=300.0, home_loss=CHUNK_TOKENS),
        DlpmBalanceParameters(quantum=100.0, worker_quantum=300.0, home_loss=CHUNK_TOKENS, patience=32),
    )

    def commands(policy: str) -> list[Command]:
        scheduler = Scheduler(POLICIES[policy], TIGHT, Parameters(*parameters), Random(0))
        random, now, given = Random(3), 0.0, list[Command]()
        running: list[RequestId] = []
        for worker in WORKERS:
            scheduler.handle(WorkerJoined(Worker(worker, frozenset(MODELS), barrier=barrier)), now)
        for step in range(400):
            now += random.random()
            text = random.choice("xyz") * random.randint(1, 9) + random.choice("abc")
            arrival = Arrived(Request(RequestId(f"r{step}"), ClientId(text[-1]), MODELS[0], (key(text),), 20))
            ended = [running.pop(random.randrange(len(running)))] if running and random.random() < 0.9 else []
            finished = [Finished(each, Usage(CHUNK_TOKENS * 3, random.randint(0, 20), 0)) for each in ended]
            events: list[Event] = [arrival, *finished]
            for event in events:
                commands = scheduler.handle(event, now)
                running += [command.request for command in commands if isinstance(command, Dispatch)]
                given += commands
        return given

    home, balance = commands("dlpm_home"), commands("dlpm_balance")
    assert (home == balance) == (barrier is None)
    assert any(isinstance(command, Dispatch) for command in home)


def test_commands_do_not_depend_on_the_order_of_sets() -> None:
    """Another process, with another seed for string hashes, returns the same commands."""
    script = "import tests.core.test_conformance as t; print([t.history(name) for name in t.NAMES])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert b"Dispatch" in outputs.pop()
