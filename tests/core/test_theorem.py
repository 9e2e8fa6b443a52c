"""In virtual time, a waiting client never falls further behind another client than the theorem's bound.

"Locality-aware Fair Scheduling in LLM Serving", Theorems 4.1 and 4.2, with what a proxy adds to their bound (see
`theorem_books`). Reservations are the limits that the clients set. `theorem_fleet` generates the events.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.clients.backlog import Backlog
from router.core.clients.queue_limits import WaitingLimits
from router.core.clients.shares import Shares
from router.core.fleet.window import FixedWindow
from router.core.model.cost import LinearCost
from router.core.model.events import Cancelled, Event, Failed, Finished, Progressed
from router.core.model.request import BarrierId, ClientId, Request, RequestId, WorkerId
from router.core.policies.balance.balance_parameters import DlpmBalanceParameters
from router.core.policies.base import Policy, PolicyFactory, Properties
from router.core.policies.context import Parameters, PolicyContext
from router.core.policies.deficit.deficits import ClientDeficits
from router.core.policies.deficit.eligibility import Eligibility
from router.core.policies.dlpm.dlpm import Dlpm
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters, DlpmParameters
from router.core.policies.queued import QueuedPolicy
from router.core.policies.registry import ORDERS, PLACEMENTS, POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS
from tests.core.theorem_books import UnfairError
from tests.core.theorem_fleet import MODELS, Cached, EngineSize, Fleet, Habits, Reporting, Scenario

MOST_DECODED = 50
"""The most output tokens of one answer in a step of an engine."""
Ordering = DlpmParameters | DlpmHomeParameters
"""Those that hold Q^u."""


def bounded() -> list[str]:
    """Return one name of each policy that declares a bound."""
    names = {factory: name for name, factory in POLICIES.items()}
    built = {name: Scheduler(POLICIES[name], SchedulerSettings(), Parameters(), Random(0)) for name in names.values()}
    return [name for name, scheduler in built.items() if scheduler.policy.properties.gap_quantum is not None]


def quanta(quantum: float) -> st.SearchStrategy[tuple[object, ...]]:
    """Return parameters of every family, with this Q^u."""
    worker_quantum = st.sampled_from([50.0, 1000.0, 100_000.0])
    head_start = st.sampled_from([0.0, 0.1 * quantum, 3 * quantum])
    home: dict[str, st.SearchStrategy[object]] = {
        "cached_first": st.booleans(),
        "cached_first_from": st.sampled_from([0, 0, 1]),
        "turn_overdraft": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "home_loss": st.sampled_from([0, 2 * CHUNK_TOKENS, 256]),
        "home_patience": st.sampled_from([0.0, 3.0, 1e6]),
        "isolation": st.sampled_from([0.0, 0.2, 1.0]),
    }
    patience, lpm_seconds = st.sampled_from([0, 1, 32]), st.sampled_from([0.1, 10.0])
    rounds = {
        "round_seconds": st.sampled_from([0.0, 0.1, 40.0]),
        "overdue_after": st.sampled_from([0.0, 0.5, 2.0]),
        "overdraft": st.sampled_from([0.0, 0.2, 2.0]),
    }
    return st.tuples(
        st.builds(
            DlpmParameters,
            quantum=st.just(quantum),
            sparse_first=st.booleans(),
            head_start=head_start,
            patience=patience,
            engine_lpm_seconds=lpm_seconds,
            **rounds,
        ),
        st.builds(
            D2lpmParameters,
            worker_quantum,
            charge_full_input=st.booleans(),
            load_slack=st.sampled_from([0, 4]),
            steal_loss=st.sampled_from([-1, 0, 2 * CHUNK_TOKENS, 256]),
        ),
        st.builds(
            DlpmHomeParameters,
            quantum=st.just(quantum),
            worker_quantum=worker_quantum,
            sparse_first=st.booleans(),
            head_start=head_start,
            patience=patience,
            engine_lpm_seconds=lpm_seconds,
            **home,
            **rounds,
        ),
        st.builds(
            DlpmBalanceParameters,
            quantum=st.just(quantum),
            sparse_first=st.booleans(),
            head_start=head_start,
            patience=patience,
            candidates=st.sampled_from([1, 3, 16]),
            beta=st.sampled_from([0.0, 48.0]),
            **home,
            **rounds,
        ),
    )


def core_settings() -> st.SearchStrategy[SchedulerSettings]:
    window = st.builds(FixedWindow, st.sampled_from([1, 2, 4, 256]), st.sampled_from([32, 512, 16_384]))
    return st.builds(
        SchedulerSettings,
        cost=st.sampled_from([LinearCost(), LinearCost(1.0, 0.0), LinearCost(0.0, 1.0), LinearCost(3.0, 0.7)]),
        waiting=st.builds(WaitingLimits, st.sampled_from([6, 5000]), st.sampled_from([0.5, 300.0])),
        window=window,
        match_minimum=st.just(CHUNK_TOKENS),
        kv_tokens=st.sampled_from([640, 400_000]),
        cached_in_flight=st.sampled_from([2 * CHUNK_TOKENS, 1_000_000]),
    )


def habits() -> st.SearchStrategy[Habits]:
    rarely, often = st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1.0, 0.5])
    return st.builds(
        Habits,
        weight=st.floats(0.25, 4.0),
        at_once=st.sampled_from([1, 2, 5, 12]),
        shared=st.sampled_from([0, 2, 10, 40]),
        own=st.sampled_from([1, 5, 20]),
        density=st.sampled_from([None, 0.05, 0.25, 1.0]),
        limit=st.sampled_from([0, 5, 40, 200]),
        stops_early=st.booleans(),
        streamed=often,
        pinned=rarely,
        cached=st.sampled_from(Cached),
        reports_usage=often,
        refused=rarely,
        broken=rarely,
        cancelled=st.sampled_from([0.0, 0.05, 0.5]),
        leaves=st.sampled_from([0.0, 0.05, 0.3]),
        returns=st.sampled_from([0.05, 0.3, 1.0]),
    )


def scenarios() -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        clients=st.lists(habits(), min_size=2, max_size=5).map(tuple),
        workers=st.integers(1, 3),
        settings=core_settings(),
        parameters=st.sampled_from([1.0, 20.0, 100.0, 1000.0, 20_000.0]).flatmap(quanta),
        engine=st.builds(
            EngineSize,
            st.sampled_from([1, 2, 8, 64]),
            st.sampled_from([32, 512, 10_000]),
            st.sampled_from([1, 4, MOST_DECODED]),
        ),
        steps=st.sampled_from([10, 30, 60]),
        seed=st.integers(0, 2**32),
        evictions=st.sampled_from([0.0, 0.05, 0.5]),
        flaps=st.sampled_from([0.0, 0.02, 0.2]),
        reorders=st.booleans(),
        barrier=st.sampled_from([None, BarrierId("rack")]),
    )


@pytest.mark.parametrize("policy", bounded())
def test_a_waiting_client_stays_within_the_bound(policy: str) -> None:
    """In every queue, while a client waits there, no other client's service runs ahead of its own by more than the
    bound.
    """

    @settings(max_examples=40 if policy in {"rr+dlpm", "d2lpm+dlpm", "dlpm_home", "dlpm_balance"} else 8)
    @given(scenario=scenarios())
    def holds(scenario: Scenario) -> None:
        fleet = Fleet(scenario, POLICIES[policy])
        assert fleet.quantum in {p.deficit_range for p in scenario.parameters if isinstance(p, Ordering)}
        for _ in fleet.run():
            pass

    holds()


def divided(scenario: Scenario, serving: tuple[frozenset[str], ...], asked: tuple[str, ...]) -> Scenario:
    """Return a scenario whose workers serve these models, and whose clients ask for one model each, in turn.

    No request is pinned and no worker leaves: either changes which workers a client can use.
    """
    clients = (replace(habits, model=asked[n % len(asked)], pinned=0.0) for n, habits in enumerate(scenario.clients))
    return replace(scenario, clients=tuple(clients), workers=len(serving), models=serving, flaps=0.0)


BASE, ADAPTER = MODELS
DIVIDED_FLEETS = {
    "an adapter on one of two": ((frozenset(MODELS), frozenset({BASE})), (BASE, ADAPTER)),
    "an adapter on one of three": ((frozenset({BASE}), frozenset(MODELS), frozenset({BASE})), (ADAPTER, BASE)),
    "two models apart": ((frozenset({BASE}), frozenset({ADAPTER})), (BASE, ADAPTER)),
    "three models in a chain": ((frozenset({BASE, "other"}), frozenset(MODELS)), ("other", ADAPTER, BASE)),
}
"""What each worker serves, and what the clients ask for."""


@pytest.mark.parametrize("policy", ["dlpm_home", "dlpm_balance"])
@pytest.mark.parametrize("fleet", DIVIDED_FLEETS)
def test_clients_that_can_use_the_same_workers_stay_within_the_bound(policy: str, fleet: str) -> None:
    """Where workers serve different models, no client's service runs ahead of that of a waiting client that can use the
    same workers by more than the bound.
    """

    @settings(max_examples=8)
    @given(scenario=scenarios())
    def holds(scenario: Scenario) -> None:
        for _ in Fleet(divided(scenario, *DIVIDED_FLEETS[fleet]), POLICIES[policy]).run():
            pass

    holds()


@pytest.mark.parametrize("policy", ["dlpm_home", "dlpm_balance"])
def test_refills_elsewhere_bring_no_client_ahead_of_one_that_waits(policy: str) -> None:
    """Clients that come for other workers, deep in debt, are refilled by many rounds. These count no more often for a
    client in debt than for one that waits for the same worker and needs only the first of them.
    """
    waits = Habits(at_once=5, own=1, limit=5)
    elsewhere, comes = Habits(at_once=1, own=1, limit=0), Habits(at_once=1, own=1, limit=0, weight=0.5)
    home = DlpmHomeParameters(1.0, round_seconds=0.0, overdue_after=0.0, home_patience=0.0, isolation=0.0)
    balance = DlpmBalanceParameters(1.0, round_seconds=0.0, overdue_after=0.0, home_patience=0.0, isolation=0.0)
    scenario = Scenario(
        (waits, elsewhere, comes),
        settings=SchedulerSettings(window=FixedWindow(1, 32)),
        parameters=(home, balance),
        engine=EngineSize(1, 32, 1),
        steps=200,
    )
    for _ in Fleet(divided(scenario, *DIVIDED_FLEETS["an adapter on one of three"]), POLICIES[policy]).run():
        pass


def test_clients_of_an_adapter_are_not_left_behind() -> None:
    """Refills that do not count for the clients of an adapter are made up for: where only one of two workers serves the
    adapter, and that is enough for them, they get at least three quarters of what the clients get who can use both.
    """
    serving, _ = DIVIDED_FLEETS["an adapter on one of two"]
    clients = tuple(replace(STEADY, limit=20, model=model) for model in (BASE, BASE, BASE, BASE, ADAPTER, ADAPTER))
    settings = SchedulerSettings(window=FixedWindow(4))
    fleet = Fleet(
        Scenario(clients, 2, serving, settings, (DlpmHomeParameters(2000.0),), steps=400), POLICIES["dlpm_home"]
    )
    for _ in fleet.run():
        pass
    service = fleet.books.queues[None].service
    assert min(service.values()) > 0.75 * max(service.values())


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_the_reported_gap_and_bound_are_correct(policy: str) -> None:
    """The reported gap equals that of the books; the bound is at least what any two clients need and at most the
    formula.
    """

    @settings(max_examples=20)
    @given(scenario=scenarios())
    def agrees(scenario: Scenario) -> None:
        fleet = Fleet(scenario, POLICIES[policy])
        fairness, books = fleet.scheduler.fairness, fleet.books
        for _ in fleet.run():
            # In a pool, what only one worker may take waits apart, and there is no gap among those that wait for it.
            for queue in [None] if fleet.properties.pooled else books.queues:
                assert fairness.gap(queue) == pytest.approx(books.gap(queue), abs=1e-6)
                bound = fairness.bound(queue, fleet.quantum)
                assert bound is not None
                assert books.needed(queue) <= bound * (1 + 1e-9)
                assert bound <= books.formula(queue) * (1 + 1e-9)

    agrees()


class LateReports:
    """Reports the output of streams to the scheduler only now and then, as a front does."""

    def __init__(self, reports: int) -> None:
        """`reports`: steps of engines in each of which output is reported once."""
        self._reports = reports
        self._steps = 0
        self._computed: dict[RequestId, int] = {}
        self.late = False
        """Whether output is computed and not reported."""

    def __call__(self, event: Event) -> list[Event]:
        """Return what is reported to the scheduler when `event` happens."""
        match event:
            case Progressed(output_tokens):
                self._computed |= output_tokens
                self._steps += 1
                self.late = self._steps % self._reports != 0
                return [] if self.late else [Progressed(dict(self._computed))]
            case Finished(request) | Failed(request) | Cancelled(request):
                self._computed.pop(request, None)
        return [event]


@pytest.mark.parametrize("policy", ["rr+dlpm", "d2lpm+dlpm", "dlpm_home", "dlpm_balance"])
def test_output_that_is_reported_late_stays_within_the_bound(policy: str) -> None:
    """What clients were really served obeys the bound that /fairness shows once the output is reported."""

    @settings(max_examples=20)
    @given(scenario=scenarios(), reports=st.sampled_from([2, 7]))
    def holds(scenario: Scenario, reports: int) -> None:
        late_reports = LateReports(reports)
        # the usage at each end reports what was late
        clients = tuple(replace(habits, reports_usage=1.0) for habits in scenario.clients)
        fleet = Fleet(replace(scenario, clients=clients), POLICIES[policy], late_reports)
        fairness, books = fleet.scheduler.fairness, fleet.books
        books.unreported = MOST_DECODED * reports
        for _ in fleet.run():
            if not late_reports.late:
                for queue in [None] if fleet.properties.pooled else books.queues:
                    bound = fairness.bound(queue, fleet.quantum)
                    assert bound is None or books.gap(queue) <= bound * (1 + 1e-9)

    holds()


# What follows breaks the scheduler on purpose: the check above must find it.

QUANTUM = 100.0
Tamper = Callable[[Eligibility, Request, int], None]
"""What is done to the counters before a request begins to wait, of whose client so many wait already."""


class TamperedDlpm(Dlpm):
    """DLPM whose deficits a test can change."""

    def __init__(self, context: PolicyContext, tamper: Tamper, worker: WorkerId) -> None:
        super().__init__(context, worker)
        self._tamper = tamper
        self._backlog: Backlog = context.backlog

    def push(self, request: Request) -> None:
        self._tamper(self._eligibility, request, self._backlog.of_client(request.client))
        super().push(request)


class TamperedHome(DlpmHome):
    """The same for a pool: `dlpm_home` whose deficits a test can change."""

    def __init__(self, context: PolicyContext, tamper: Tamper) -> None:
        super().__init__(context)
        self._tamper = tamper

    def enqueue(self, request: Request, now: float) -> None:
        self._tamper(self._eligibility, request, self._backlog.of_client(request.client))
        super().enqueue(request, now)


def tampered(pooled: bool, tamper: Tamper) -> PolicyFactory:
    """Return a policy, for one worker's queue or for a pool, whose deficits are tampered with."""

    def build(context: PolicyContext) -> Policy:
        if pooled:
            return TamperedHome(context, tamper)
        order = partial(TamperedDlpm, context, tamper)
        return QueuedPolicy(context, PLACEMENTS["rr"](context), order, Properties(QUANTUM))

    return build


def leave_alone(eligibility: Eligibility, request: Request, waiting: int) -> None:
    """Change nothing."""


def refill_for_one(eligibility: Eligibility, request: Request, waiting: int) -> None:  # noqa: ARG001
    """Refill without the condition of CHECKREFILL: one client without deficit gets a quantum while another waiting one
    has some left.
    """
    deficit = eligibility.deficit(request.client)
    if deficit is not None and deficit <= 0:
        eligibility.charge(request.client, -QUANTUM)


def shed_by_churn(eligibility: Eligibility, request: Request, waiting: int) -> None:
    """Apply line 12 of Algorithm 1 to every client that had nothing queued: its deficit begins again."""
    deficit = eligibility.deficit(request.client)
    if not waiting and deficit is not None and deficit < 0:
        eligibility.charge(request.client, deficit)


class Saved(ClientDeficits):
    """Deficits that also get a quantum while they are positive."""

    def refill(self, contenders: Iterable[ClientId], part: float = 1.0) -> int:
        eligible = [client for client in self if self.deficit(client) > 0]
        rounds = super().refill(contenders, part)
        for client in eligible:
            self.charge(client, -rounds * part * QUANTUM)
        return rounds


def save_up_deficits(eligibility: Eligibility, request: Request, waiting: int) -> None:  # noqa: ARG001
    """Let a refill add a quantum to positive deficits, too."""
    if not isinstance(eligibility._deficits, Saved):
        saved = eligibility._deficits = eligibility._refills._schedule._deficits = Saved(Shares())
        eligibility._refill_rounds._deficits = eligibility._cuts._deficits = saved


def report_all(event: Event) -> list[Event]:
    """Report every event to the scheduler."""
    return [event]


def settle_nothing(event: Event) -> list[Event]:
    """Withhold the engine's usage at the end of each request."""
    return [replace(event, usage=None) if isinstance(event, Finished | Failed | Cancelled) else event]


STEADY = Habits(at_once=12)
HEAVY = Habits(at_once=12, own=10, limit=100)
UNCACHED = Habits(at_once=12, shared=20, cached=Cached.NOTHING)
"""Whose prompts are predicted to be cached, and never are."""
CHURNING = Habits(at_once=1, weight=0.25, limit=100)
"""Which has never anything queued when it comes."""
SHORT = Habits(at_once=12, own=20, limit=0)
"""Whose calls have ended when the next round of turns begins."""
RESTING = Habits(at_once=12, leaves=0.1, returns=0.02)


def before(policy: PolicyFactory, clients: tuple[Habits, ...], reporting: Reporting = report_all) -> Fleet:
    """Return a fleet with these clients before two slots: of one worker, or of two workers that share a pool."""
    parameters = (DlpmParameters(QUANTUM), DlpmHomeParameters(QUANTUM))
    one = Scenario(clients, settings=SchedulerSettings(window=FixedWindow(2)), parameters=parameters, steps=1200)
    two = replace(one, workers=2, settings=SchedulerSettings(window=FixedWindow(1)))
    fleet = Fleet(one, policy, reporting)
    return Fleet(two, policy, reporting) if fleet.properties.pooled else fleet


@pytest.mark.interpreted("the test extends classes of the scheduler")
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("clients", "tamper", "reporting"),
    [
        ((STEADY, HEAVY), refill_for_one, report_all),
        ((STEADY, HEAVY, RESTING), save_up_deficits, report_all),
        ((STEADY, UNCACHED), leave_alone, settle_nothing),
        ((STEADY, CHURNING), shed_by_churn, report_all),
    ],
    ids=["refill while others have credit", "refill those with credit", "no settlement", "debts shed by churn"],
)
def test_a_scheduler_that_breaks_a_rule_is_found(
    clients: tuple[Habits, ...], tamper: Tamper, reporting: Reporting, pooled: bool
) -> None:
    """The check that a correct scheduler passes with these clients fails for each scheduler that breaks a rule."""
    sound = before(tampered(pooled, leave_alone), clients)
    for _ in sound.run():
        pass
    assert 0.2 < sound.books.tightness <= 1
    with pytest.raises(UnfairError):
        for _ in before(tampered(pooled, tamper), clients, reporting).run():
            pass


ALWAYS_FRESH = DlpmHomeParameters(QUANTUM, head_start=1e9, overdue_after=0.0, cached_first_from=0)


def turns_with(overdraft: float) -> PolicyFactory:
    """Return a pool that lets clients have turns with this debt, in quanta, and declares a bound for one quantum."""

    class Turns(DlpmHome):
        def __init__(self, context: PolicyContext) -> None:
            super().__init__(context, replace(ALWAYS_FRESH, turn_overdraft=overdraft))
            self.properties = replace(self.properties, gap_quantum=2 * QUANTUM)

    return Turns


@pytest.mark.interpreted("the test extends classes of the scheduler")
def test_turns_with_more_debt_than_the_bound_allows_are_found() -> None:
    """Clients that have turns in rounds with a debt of one quantum stay within the bound for it; with any debt not."""
    window = SchedulerSettings(window=FixedWindow(1))
    clients = (STEADY, SHORT, HEAVY)  # of two, each waits for its own call in flight
    scenario = Scenario(clients, 2, settings=window, parameters=(ALWAYS_FRESH,), steps=1200)
    sound = Fleet(scenario, turns_with(1.0))
    for _ in sound.run():
        pass
    assert 0.2 < sound.books.tightness <= 1
    with pytest.raises(UnfairError):
        for _ in Fleet(scenario, turns_with(1e9)).run():
            pass


class Undivided(DlpmHome):
    """A pool whose refills count for all clients, whichever workers these can use."""

    def _divide_refills(self) -> None:
        pass


@pytest.mark.interpreted("the test extends classes of the scheduler")
@pytest.mark.parametrize("fleet", ["two models apart", "an adapter on one of two"])
def test_refills_that_count_for_all_workers_are_found(fleet: str) -> None:
    """The check finds that refills break the bound if they count for clients that wait for other workers."""
    clients = (HEAVY, STEADY, STEADY, HEAVY, STEADY, STEADY)
    window = SchedulerSettings(window=FixedWindow(1))
    scenario = Scenario(clients, settings=window, parameters=(DlpmHomeParameters(QUANTUM),), steps=600)
    for _ in Fleet(divided(scenario, *DIVIDED_FLEETS[fleet]), DlpmHome).run():
        pass
    with pytest.raises(UnfairError):
        for _ in Fleet(divided(scenario, *DIVIDED_FLEETS[fleet]), Undivided).run():
            pass


def first_come_first_served(context: PolicyContext) -> Policy:
    """Return an order without deficits that declares a bound all the same."""
    order = partial(ORDERS["fcfs"].build, context)
    return QueuedPolicy(context, PLACEMENTS["rr"](context), order, Properties(QUANTUM))


def test_an_order_that_keeps_no_bound_is_found() -> None:
    """The check finds that first come, first served lets the heaviest client gain without limit."""
    with pytest.raises(UnfairError):
        for _ in before(first_come_first_served, (STEADY, HEAVY)).run():
            pass
