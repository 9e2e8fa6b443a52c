"""The router's core over emulated engines in virtual time: this plays clients, gateway and network.

It feeds the scheduler what the gateway feeds it live, and when: `Started` with the first token, `Progressed` for all
streams at once every `progress_seconds`, `Finished` with the engine's usage and the hashes of prompt and answer.
Equal scenarios give equal records, and nothing sleeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Final, Protocol, assert_never

from bench.report.records import Result
from bench.sim.agenda import Agenda
from bench.sim.block_events import BlockEvents
from bench.sim.emulated_worker import EmulatedWorker
from bench.sim.flight import Flight
from bench.sim.observation import Observation
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.parts.prompts import BLOCK_HASHER
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome
from router.core.model.commands import Command, Dispatch, Reject, WakeAt
from router.core.model.events import (
    Arrived,
    CacheReport,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progressed,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from router.core.model.request import ClientId, GroupId, Request, RequestId, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from workers.engine.model import QueueFull, RequestTooLarge
from workers.engine.model import Request as EngineRequest

MODEL: Final = "emulated"
DRAIN_FACTOR: Final = 20
"""How many times as long as it ran a simulation may take to drain."""


class Observer(Protocol):
    """Hears of every event and what came of it; changes nothing."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The scheduler took in an event and gave these commands."""


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, observers: Sequence[Observer] = ()) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(
            POLICIES[scenario.policy],
            scenario.settings,
            Parameters(*scenario.parameters),
            Random(scenario.seed),
            self._really_cached if scenario.oracle else None,
        )
        self.workers: dict[WorkerId, EmulatedWorker] = {}
        """Those that joined, whether or not they left."""
        self._block_sizes: set[int] = set()
        """Of the workers whose KV events are followed."""
        self._told: dict[WorkerId, int | None] = {}
        """The capacity that each worker's metrics tell, in tokens."""
        self._observers = observers
        self._agenda = Agenda()
        self._flights: dict[RequestId, Flight] = {}
        self._streams: dict[RequestId, Flight] = {}
        self._numbers = count(1)
        self._gathering = False
        self._alarm = 0
        self._to_come = 0
        """Calls of programs that have begun, each to come at a time that is known."""
        clients = scenario.workload.clients(scenario.seed)
        self._observation = Observation(self.scheduler, self.workers, {c.name: c.weight for c in clients})
        self._set_up(clients)

    def run(self) -> Result:
        """Let it all happen; to be called once."""
        scenario, agenda = self.scenario, self._agenda
        agenda.run(until=scenario.warmup)
        self._observation.begin(agenda.now)
        agenda.run(until=scenario.seconds)
        self._observation.end(agenda.now)
        if scenario.drain:
            agenda.run(scenario.seconds * DRAIN_FACTOR, going=self._is_busy)
        for flight in list(self._flights.values()):
            self._observation.record(flight, Outcome.UNFINISHED, agenda.now)
        return self._observation.result()

    def _really_cached(self, request: Request) -> Mapping[WorkerId, int]:
        """What each engine would find of a request if it began with it now."""
        prompt = self._flights[request.id].call.prompt.tokens
        found = {}
        for name, worker in self.workers.items():
            worker.catch_up()
            found[name] = worker.engine.cached_prefix_tokens(prompt)
        return {name: tokens for name, tokens in found.items() if tokens}

    def _is_busy(self) -> bool:
        """An engine may be busy with a call whose end the router has seen: news of a cancellation takes its time."""
        if self._flights or self._to_come:
            return True
        return any(worker.engine.has_work for worker in self.workers.values())

    def _set_up(self, clients: Sequence[Client]) -> None:
        for number, spec in enumerate(self.scenario.workers, 1):
            worker = WorkerId(f"w{number}")
            self._agenda.at(spec.joins, partial(self._join, worker, number, spec))
            if spec.leaves < self.scenario.seconds:
                self._agenda.at(spec.leaves, partial(self._leave, worker, spec))
        self._poll(0)
        for client in clients:
            self._await_next(client, iter(client.calls))

    def _feed(self, event: Event) -> None:
        now = self._agenda.now
        commands = self.scheduler.handle(event, now)
        for observer in self._observers:
            observer.observe(now, event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(request):
                flight = self._flights[request]
                flight.dispatched(command, self._agenda.now)
                self._later(partial(self._submit, flight))
            case Reject(request):
                self._end(self._flights[request], Outcome.REJECTED)
            case WakeAt(time):
                self._alarm += 1
                self._agenda.at(time, partial(self._tick, self._alarm))
            case _:
                assert_never(command)

    def _later(self, action: partial[None]) -> None:
        """Do it when the engine hears of it."""
        self._agenda.at(self._agenda.now + self.scenario.latency, action)

    def _tick(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._feed(Ticked())

    def _await_next(self, client: Client, calls: Iterator[Call]) -> None:
        call = next(calls, None)
        if call is not None and call.at < self.scenario.seconds:
            self._agenda.at(call.at, partial(self._arrive_unasked, client, call, calls))

    def _arrive_unasked(self, client: Client, call: Call, calls: Iterator[Call]) -> None:
        self._await_next(client, calls)
        self._arrive(client, call)

    def _continue(self, client: Client, call: Call) -> None:
        """The next call of a program, which is run to its end where calls are."""
        self._to_come -= 1
        self._arrive(client, call, late=self.scenario.drain)

    def _arrive(self, client: Client, call: Call, *, late: bool = False) -> None:
        """`late`: even if no more calls come of themselves."""
        now = self._agenda.now
        if now >= self.scenario.seconds and not late:
            return
        name = RequestId(f"r{next(self._numbers)}")
        request = Request(
            name,
            ClientId(client.name),
            MODEL,
            (call.prompt.key,),
            call.output_limit,
            call.streamed,
            weight=client.weight,
            blocks=(call.prompt.block_key(self._block_sizes),) if self._block_sizes else (),
            group=None if client.group is None else GroupId(client.group),
        )
        flight = self._flights[name] = Flight(client, call, request, now)
        self._observation.arrived(flight)
        if call.cancel_after is not None:
            self._agenda.at(now + call.cancel_after, partial(self._cancel, flight))
        self._feed(Arrived(request))

    def _submit(self, flight: Flight) -> None:
        """The call reaches the engine."""
        if flight.ended or flight.worker is None:
            return
        call, request = flight.call, flight.request
        asked = EngineRequest(request.id, call.prompt.tokens, call.output_tokens, ignore_eos=True, sample=call.sample)
        try:
            self.workers[flight.worker].submit(asked, flight.progress)
        except (QueueFull, RequestTooLarge):
            self._later(partial(self._refused, flight))

    def _refused(self, flight: Flight) -> None:
        if not flight.ended:
            self._settle(flight, Failed(flight.request.id, accepted=False), Outcome.FAILED)

    def _deliver(self, name: str, last: bool) -> None:
        """A request's first token reaches the router, or its last."""
        flight = self._flights.get(RequestId(name))
        if flight is None:
            return
        if last:
            usage = flight.usage(self._agenda.now)
            self._settle(flight, Finished(flight.request.id, usage, flight.answers()), Outcome.DONE)
        elif flight.call.streamed:
            self._start(flight)

    def _start(self, flight: Flight) -> None:
        flight.started = self._agenda.now
        self._streams[flight.request.id] = flight
        if not self._gathering:
            self._gathering = True
            self._gather_later()
        self._feed(Started(flight.request.id))

    def _gather_later(self) -> None:
        self._agenda.at(self._agenda.now + self.scenario.progress_seconds, self._gather)

    def _gather(self) -> None:
        """Tell how far every stream is."""
        self._gathering = bool(self._streams)
        if self._gathering:
            self._gather_later()
        now = self._agenda.now
        progressed = {}
        for name, flight in self._streams.items():
            tokens = flight.progress.seen(now)
            if tokens != flight.charged:
                flight.charged = progressed[name] = tokens
        if progressed:
            self._feed(Progressed(progressed))
            self._observation.sample_gaps()

    def _cancel(self, flight: Flight) -> None:
        """Its client leaves; the engine hears of it a little later."""
        if flight.ended:
            return
        if flight.worker is not None:
            self._later(partial(self._abort, flight.worker, flight.request.id))
        usage = flight.usage(self._agenda.now) if flight.started is not None else None
        self._settle(flight, Cancelled(flight.request.id, usage), Outcome.CANCELLED)

    def _abort(self, worker: WorkerId, request: RequestId) -> None:
        self.workers[worker].abort(request)

    def _settle(self, flight: Flight, ending: Finished | Failed | Cancelled, outcome: Outcome) -> None:
        self._streams.pop(flight.request.id, None)
        self._end(flight, outcome)
        self._feed(ending)

    def _end(self, flight: Flight, outcome: Outcome) -> None:
        """Nothing more will be heard of it; its client goes on."""
        now = self._agenda.now
        del self._flights[flight.request.id]
        flight.ended = True
        self._observation.record(flight, outcome, now)
        if flight.call.then is not None:
            answer = flight.answer if outcome is Outcome.DONE else ()
            for call in flight.call.then(flight.call, Ending(outcome, now, answer)):
                goes_on = call.program is not None and call.program == flight.call.program
                self._to_come += goes_on
                self._agenda.at(call.at, partial(self._continue if goes_on else self._arrive, flight.client, call))

    def _join(self, worker: WorkerId, place: int, spec: WorkerSpec) -> None:
        scenario = self.scenario
        engine = spec.engine(scenario.seed)
        events = BlockEvents(worker, engine, BLOCK_HASHER) if scenario.kv_events else None
        self.workers[worker] = EmulatedWorker(
            engine,
            place,
            self._agenda,
            scenario.latency,
            self._deliver,
            jumps=scenario.jumps and events is None,
            publish=None if events is None else partial(self._published, events),
        )
        self._told[worker] = engine.capacity if spec.tell_capacity else None
        config = engine.config
        batch = config.max_batched_tokens if spec.dialect == "sglang" else None  # vLLM does not tell
        facts = Worker(
            worker, frozenset({MODEL}), reorders=spec.order == "lpm", engine=spec.dialect, batch_tokens=batch
        )
        self._feed(WorkerJoined(facts))
        if events is not None:
            self._block_sizes.add(config.block_size)
            self._feed(events.followed)
        self._report(worker)

    def _published(self, events: BlockEvents) -> partial[None] | None:
        change = events.after_step()
        return None if change is None else partial(self._feed, change)

    def _leave(self, worker: WorkerId, spec: WorkerSpec) -> None:
        self._feed(WorkerLeft(worker))
        if spec.crashes:
            for flight in [flight for flight in self._flights.values() if flight.worker == worker]:
                self._abort(worker, flight.request.id)
                usage = flight.usage(self._agenda.now) if flight.started is not None else None
                self._settle(flight, Failed(flight.request.id, accepted=True, usage=usage), Outcome.FAILED)

    def _poll(self, number: int) -> None:
        """Read every worker's metrics."""
        self._agenda.at((number + 1) * self.scenario.poll_seconds, partial(self._poll, number + 1))
        for worker in self.workers:
            self._report(worker)
        self._observation.sample_gaps()
        self._observation.sample_service(self._agenda.now)

    def _report(self, worker: WorkerId) -> None:
        emulated = self.workers[worker]
        emulated.catch_up()
        engine, counters = emulated.engine, emulated.engine.counters
        evicted = counters.evicted_tokens if engine.config.dialect == "sglang" else None  # vLLM does not count them
        cache = CacheReport(
            block_tokens=engine.config.block_size,
            computed_tokens=counters.prompt_tokens,
            hit_tokens=counters.prefix_hits,
            evicted_tokens=evicted,
        )
        self._feed(WorkerReported(worker, engine.running, engine.waiting, self._told[worker], cache))
