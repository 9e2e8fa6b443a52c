"""The scheduler dies and another run takes over: what waits waits on, what runs goes on, all of it is charged once."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.channel.client import SchedulerClient
from router.channel.front_channel import FrontChannel
from router.channel.messages import AllReported, Assignment, RanBefore, SchedulerMessage
from router.channel.socket import ChannelClosed, ChannelServer, UnixRoute
from router.config.settings import Settings
from router.core.model.commands import Deficit
from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import Cancelled, Fault, Finished, Resumed, Returned, WorkerJoined
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.persistence.state_file import FILE_NAME, load
from router.process.scheduling import SchedulerSide, build_scheduler
from router.process.takeover import new_takeover, run_file
from tests.support.running import TIMEOUT_S, until

HASHER = PromptHasher(b"0123456789abcdef")
WORKERS = ("127.0.0.1:1", "127.0.0.1:2")
"""Nothing listens there; the tests play what the workers do."""
MODEL = "m"


@dataclass
class Call:
    """One request of a front, as its relay drives it."""

    front: SchedulerClient
    request: Request
    assignment: "asyncio.Future[Assignment]"
    output: int = 0
    started: bool = False
    charged: Tokens = NOTHING
    """What it must have been charged once it has ended."""

    @property
    def placed(self) -> bool:
        return self.assignment.done()

    def usage(self, random: Random) -> Usage:
        """What its worker reports, larger than what has streamed."""
        self.output += random.randrange(5)
        size = 100 + random.randrange(100)
        usage = Usage(size, self.output, random.randrange(size))
        assert usage.cached_tokens is not None
        if self.charged == NOTHING:
            self.charged = Tokens(size - usage.cached_tokens, usage.cached_tokens, 0)
        self.charged = self.charged._replace(output=max(self.charged.output, self.output))
        return usage


@dataclass
class Expected:
    """What clients must have been charged in the end."""

    served: defaultdict[ClientId, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    calls: Counter[ClientId] = field(default_factory=Counter)

    def ended(self, call: Call) -> None:
        """Add a call that has ended."""
        client = call.request.client
        self.served[client] = self.served[client].plus(call.charged)
        self.calls[client] += 1


class Runs:
    """The runs of a scheduler, one after the other, at one path."""

    def __init__(self, folder: Path, stack: AsyncExitStack, *, in_cluster: bool = False, **more: object) -> None:
        """`in_cluster`: whether runs have epochs, and fronts the names of replicas."""
        self.in_cluster = in_cluster
        self._folder = folder
        self._stack = stack
        self.channel = str(folder / "channel")
        self._settings = Settings.model_validate(
            {"worker": [f"http://{worker}" for worker in WORKERS], "max_inflight": 2, "window": "fixed", **more}
        )
        self.side: SchedulerSide
        self.server: ChannelServer
        self.channels: list[FrontChannel] = []
        self.count = 0

    async def begin(self, *fronts: int, saves: bool = True, patience: float = TIMEOUT_S) -> None:
        """Begin a run; all but the first take over from the one before, and wait for these fronts.

        `saves`: whether it lives long enough to save its state; `patience`: seconds in which the fronts must report,
        which should be none where one is missing.
        """
        folder = self._folder / "run"
        self.side = build_scheduler(
            self._settings,
            lambda _: (),
            _no_address,
            load(folder, inf, 0.0) if self.count else None,
            goes_on=self.count > 0,
        )
        self.count += 1
        self.state = run_file(self.side, folder, self._settings.policy, 3600.0)
        epoch = self.count if self.in_cluster else 0
        self.server = ChannelServer(self.side.host, self.side.secret, self.channel, epoch)
        for part in self.side.observing:
            await self._stack.enter_async_context(part)
        saved = self.side.saved
        sessions = [] if saved is None else [front.session for front in saved.fronts]
        takeover = new_takeover(self.side, sessions if self.in_cluster else fronts, patience)
        if takeover is not None:
            takeover.begin()
        await self.server.__aenter__()
        if takeover is None:
            for worker in WORKERS:
                self.side.host.feed(WorkerJoined(Worker(WorkerId(worker), frozenset({MODEL}))))
        else:
            await takeover.finish()
        if saves:
            await self.state.save()

    async def kill(self) -> None:
        """End a run without a word: what it has not saved is lost."""
        await self.server.__aexit__()
        self.side.host.close()

    async def front(self, number: int) -> SchedulerClient:
        """Connect a front, which stays connected to whatever run there is."""
        channel = FrontChannel(UnixRoute(self.channel), number, "replica" if self.in_cluster else "")
        self.channels.append(channel)
        await channel.open()
        client = SchedulerClient(asyncio.get_running_loop().time)
        channel.attach(client)
        await self._stack.enter_async_context(channel)
        self._stack.callback(client.close)
        return client

    def served(self) -> dict[ClientId, Tokens]:
        """What each client was served, by the present run's books. Its usage of the day is the same."""
        ledger = self.side.host.scheduler.ledger
        served = {client: account.served for client, account in ledger.accounts.items() if account.served != NOTHING}
        used = {row.client: row for piece in ledger.saved_usage() for row in piece.rows}
        assert {
            client: Tokens(row.input_tokens - row.cached_tokens, row.cached_tokens, row.output_tokens)
            for client, row in used.items()
            if row[4:7] != (0, 0, 0)
        } == served
        return served

    def calls(self) -> dict[ClientId, int]:
        """How many calls of each client count, by the present run's books."""
        pieces = self.side.host.scheduler.ledger.saved_usage()
        return {row.client: row.calls for piece in pieces for row in piece.rows}


async def _no_address(host: str, port: int) -> list[str]:
    raise OSError(host, port)


@asynccontextmanager
async def runs_in(folder: Path, *, in_cluster: bool = False, **more: object) -> AsyncIterator[Runs]:
    """`in_cluster`: as in `Runs`; `more`: settings."""
    async with AsyncExitStack() as stack:
        runs = Runs(folder, stack, in_cluster=in_cluster, **more)
        await runs.begin()
        yield runs
        await runs.kill()


def request(name: str, client: str) -> Request:
    return Request(RequestId(name), ClientId(client), MODEL, (HASHER.prompt(name.encode() * 200).key,))


async def test_what_waits_and_what_runs_goes_on(tmp_path: Path) -> None:
    """A call that waited is placed by the next run; one that ended meanwhile, and one that ends later, are charged."""
    async with runs_in(tmp_path) as runs:
        front = await runs.front(1)
        running = [request(name, "ann") for name in "abcd"]
        for each in running:
            await front.submit(each)
        waiting = front.submit(request("e", "bob"))
        await until(lambda: runs.side.host.scheduler.waiting == 1)
        await runs.state.save()
        front.start_stream(RequestId("a"), lambda: 3)
        await runs.kill()
        front.settle(Finished(RequestId("a"), Usage(100, 7, 0)))
        later = front.submit(request("f", "bob"))
        await runs.begin(1)
        assert (await waiting).worker in WORKERS
        assert not later.done()
        front.settle(Finished(RequestId("b"), Usage(100, 1, 0)))
        assert (await later).worker in WORKERS
        for name in "cdef":
            front.settle(Finished(RequestId(name), Usage(100, 1, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(400, 0, 10), "bob": Tokens(200, 0, 2)}


async def test_what_fronts_report_is_not_added_to_the_state_directory(tmp_path: Path) -> None:
    """A run whose predecessor could leave it nothing begins with what fronts report, and charges it once."""
    more: dict[str, Any] = {"state": str(tmp_path / "directory"), "hash_secret": "0123456789abcdef"}
    async with runs_in(tmp_path, in_cluster=False, **more) as runs:
        front = await runs.front(1)
        await front.submit(request("a", "ann"))
        front.settle(Finished(RequestId("a"), Usage(100, 7, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.side.state is not None
        await runs.side.state.save()
        await runs.kill()
        (tmp_path / "run" / FILE_NAME).unlink()
        await runs.begin(1)
        await front.submit(request("b", "ann"))  # placed after the report
        front.settle(Finished(RequestId("b"), Usage(100, 7, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(200, 0, 14)}


async def test_two_fronts_with_the_same_id_keep_their_own_requests(tmp_path: Path) -> None:
    """The next run knows each under the id that the run before gave it."""
    async with runs_in(tmp_path) as runs:
        one, two = await runs.front(1), await runs.front(2)
        first, second = await one.submit(request("same", "ann")), await two.submit(request("same", "bob"))
        assert second.known_as is not None
        assert first.known_as is None
        await runs.kill()
        await runs.begin(1, 2)
        assert runs.side.host.scheduler.attempts.keys() == {"same", second.known_as}
        two.settle(Finished(RequestId("same"), Usage(50, 2, 0)))
        one.settle(Finished(RequestId("same"), Usage(70, 3, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(70, 0, 3), "bob": Tokens(50, 0, 2)}


async def test_a_front_that_is_gone_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The next run goes on without it, and its client keeps owing for what the state says."""
    async with runs_in(tmp_path) as runs, AsyncExitStack() as gone:
        channel = FrontChannel(UnixRoute(runs.channel), 2)
        await channel.open()
        client = SchedulerClient(asyncio.get_running_loop().time)
        channel.attach(client)
        await gone.enter_async_context(channel)
        await client.submit(request("a", "ann"))
        client.start_stream(RequestId("a"), lambda: 3)
        await until(lambda: bool(runs.served()))
        await runs.state.save()
        owed = runs.served()
        client.close()
        await gone.aclose()
        await runs.kill()
        await runs.begin(2, patience=0.0)
        host = runs.side.host
        assert not host.scheduler.fleet.held
        assert runs.served() == owed
        assert RequestId("a") in host.earlier.unclaimed  # the front may only be late
        await runs.front(2)  # its place is taken
        await until(lambda: RequestId("a") not in host.earlier.unclaimed)
        assert not list(host.scheduler.charged_requests())
        assert runs.served() == owed


async def test_a_front_that_missed_two_leaders_is_charged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A parted network keeps it from the first; the second does not wait for it, and charges what it reports once."""
    async with runs_in(tmp_path, in_cluster=True) as runs, AsyncExitStack() as parted:
        channel = FrontChannel(UnixRoute(runs.channel), 1, "replica")
        await channel.open()
        client = SchedulerClient(asyncio.get_running_loop().time)
        channel.attach(client)
        parted.callback(client.close)
        await client.submit(request("a", "ann"))
        client.start_stream(RequestId("a"), lambda: 3)
        await until(lambda: bool(runs.served()))
        await runs.state.save()
        for _ in range(2):
            await runs.kill()
            await runs.begin(patience=0.0)
        assert len([each for each in caplog.messages if "have not reported" in each]) == 1
        assert RequestId("a") in runs.side.host.earlier.unclaimed
        await parted.enter_async_context(channel)
        client.settle(Finished(RequestId("a"), Usage(100, 7, 0)))
        await until(lambda: runs.side.host.at_rest and not runs.side.host.earlier.unclaimed)
        assert runs.served() == {"ann": Tokens(100, 0, 7)}


async def test_a_front_that_is_started_again_has_its_predecessor_forgotten(tmp_path: Path) -> None:
    """What that ran is charged as far as the state says, and nobody waits for it."""
    async with runs_in(tmp_path, in_cluster=True) as runs:
        channel = FrontChannel(UnixRoute(runs.channel), 1, "replica")
        await channel.open()
        client = SchedulerClient(asyncio.get_running_loop().time)
        channel.attach(client)
        await client.submit(request("a", "ann"))
        await runs.state.save()
        client.close()
        await runs.kill()
        await runs.begin(patience=0.0)
        assert RequestId("a") in runs.side.host.earlier.unclaimed
        await runs.front(1)
        await until(lambda: not runs.side.host.earlier.unclaimed)
        assert not list(runs.side.host.earlier.fronts)
        assert not list(runs.side.host.scheduler.charged_requests())


@pytest.mark.parametrize(
    ("seed", "in_cluster"), [*[(seed, False) for seed in range(10)], *[(seed, True) for seed in range(4)]]
)
async def test_the_books_are_exact_however_often_the_scheduler_dies(
    tmp_path: Path, seed: int, *, in_cluster: bool
) -> None:
    """Each call is charged what its workers reported, once, whatever was saved, in flight or lost when a run died, and
    in a cluster whatever was in flight when a connection broke.
    """
    random = Random(seed)
    expected = Expected()
    async with runs_in(tmp_path, in_cluster=in_cluster) as runs:
        fronts = [await runs.front(1), await runs.front(2)]
        calls: list[Call] = []
        for step in range(120):
            await _move(random, runs, fronts, calls, expected, step)
        while calls:
            await until(lambda: any(call.placed for call in calls))
            for call in [call for call in calls if call.placed]:
                _drive(random, "finish", call, calls, expected)
        await until(lambda: runs.side.host.at_rest)
        scheduler = runs.side.host.scheduler
        scheduler.ledger.check_conservation()
        assert runs.count > 2
        assert scheduler.live == 0
        assert not list(scheduler.charged_requests())
        assert runs.served() == {client: tokens for client, tokens in expected.served.items() if tokens != NOTHING}
        assert runs.calls() == expected.calls


async def _move(
    random: Random,
    runs: Runs,
    fronts: list[SchedulerClient],
    calls: list[Call],
    expected: Expected,
    step: int,
) -> None:
    """Let one thing happen: a call arrives, starts, streams, fails or ends, the state is saved, or a run dies."""
    placed = [call for call in calls if call.placed]
    what = random.choice(["arrive"] * 4 + ["start", "return", "finish", "finish", "leave", "save", "die", "pause"])
    dies = step % 50 == 49 or (what == "die" and random.random() < 0.5)
    if runs.in_cluster and random.random() < 0.1:
        _break(random, runs)
    if dies:
        for saves in random.choice([(True,), (False, True), (False, False)]):
            await runs.kill()
            await asyncio.sleep(0)  # a turn in which a front can notice it, before there is another run
            await runs.begin(1, 2, saves=saves)
    elif what == "arrive":
        front, client = random.choice(fronts), random.choice(["ann", "bob"])
        name = f"r{random.randrange(3)}"  # another front may have it, too
        asked = request(f"r{step}" if RequestId(name) in front else name, client)
        calls.append(Call(front, asked, front.submit(asked)))
    elif what == "save":
        await runs.state.save()
    elif what == "pause":
        await until(lambda: runs.side.host.scheduler.live > 0 or not calls)
    elif placed:
        _drive(random, what, random.choice(placed), calls, expected)


def _break(random: Random, runs: Runs) -> None:
    """Break one connection: what its sides have sent in this turn is lost, and what is on its way."""
    ends = [*runs.server._ends, *[channel._end for channel in runs.channels if channel._end is not None]]
    if ends:
        random.choice(ends).abort()


def _drive(random: Random, what: str, call: Call, calls: list[Call], expected: Expected) -> None:
    name = call.request.id
    if what == "start" and not call.started:
        call.started = True
        call.front.start_stream(name, lambda: call.output)
    elif what == "return":
        usage = call.usage(random)
        call.started = False
        call.assignment = call.front.resubmit(Returned(name, accepted=True, fault=Fault.FULL, usage=usage))
    elif what in ("finish", "leave"):
        usage = call.usage(random)
        call.front.settle(Finished(name, usage) if what == "finish" else Cancelled(name, usage))
        calls.remove(call)
        expected.ended(call)


async def test_a_front_that_a_live_run_has_given_up_ends(tmp_path: Path) -> None:
    """The run has settled what the front had, so the front must not report it again."""
    async with runs_in(tmp_path) as runs:
        channel = FrontChannel(UnixRoute(runs.channel), 1)
        await channel.open()
        async with channel:
            assert channel._end is not None
            channel._end.abort()
            with pytest.raises(ChannelClosed, match="which lives"):
                await channel.lost()


async def test_a_front_that_starts_while_the_scheduler_is_away_waits_for_it(tmp_path: Path) -> None:
    """When both have died, neither needs the other to start again."""
    async with runs_in(tmp_path) as runs:
        await runs.kill()
        starting = asyncio.create_task(runs.front(1))
        await asyncio.sleep(0)  # one turn, in which it tries to connect, and nobody listens
        await runs.begin()
        assert (await (await starting).submit(request("a", "ann"))).worker in WORKERS


async def test_the_output_before_a_takeover_teaches_nothing_of_the_pace(tmp_path: Path) -> None:
    """However long a stream was, its worker has not produced it in the moment in which it was reported."""
    async with runs_in(tmp_path) as runs:
        front = await runs.front(1)
        assignment = await front.submit(request("a", "ann"))
        front.start_stream(RequestId("a"), lambda: 100_000)
        await until(lambda: bool(runs.served()))
        await runs.kill()
        await runs.begin(1)
        worker = runs.side.host.scheduler.fleet[assignment.worker]
        pace = worker.service_rate.seconds_per_output_token
        front.settle(Finished(RequestId("a"), Usage(50, 100_000, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(50, 0, 100_000)}
        assert worker.service_rate.seconds_per_output_token == pytest.approx(pace)


async def test_an_id_that_another_front_takes_meanwhile_stays_with_its_request(tmp_path: Path) -> None:
    """Under that id the state says what the request was charged, so a later request with the same id gets another,
    whichever front reports first.
    """
    async with runs_in(tmp_path) as runs:
        one, two = await runs.front(1), await runs.front(2)
        await two.submit(request("same", "ann"))
        two.start_stream(RequestId("same"), lambda: 5)
        await until(lambda: bool(runs.served()))
        await runs.state.save()
        await runs.kill()
        later = one.submit(request("same", "bob"))
        await runs.begin(1, 2)
        assert (await later).known_as is not None
        two.settle(Finished(RequestId("same"), Usage(100, 7, 0)))
        one.settle(Finished(RequestId("same"), Usage(50, 2, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(100, 0, 7), "bob": Tokens(50, 0, 2)}


async def test_both_attempts_of_a_request_that_gets_another_id_are_one_request(tmp_path: Path) -> None:
    """Even if no state knew the request, so that another one got its id."""
    async with runs_in(tmp_path) as runs:
        one, two = await runs.front(1), await runs.front(2)
        await two.submit(request("same", "ann"))
        await two.resubmit(Returned(RequestId("same"), accepted=True, fault=Fault.BROKEN, usage=Usage(100, 2, 0)))
        await runs.kill()
        later = one.submit(request("same", "bob"))
        await runs.begin(1, 2)
        await later
        assert runs.side.host.scheduler.live == 2
        two.settle(Finished(RequestId("same"), Usage(100, 7, 0)))
        one.settle(Finished(RequestId("same"), Usage(50, 2, 0)))
        await until(lambda: runs.side.host.at_rest)
        assert runs.served() == {"ann": Tokens(100, 0, 7), "bob": Tokens(50, 0, 2)}


async def test_a_waiting_request_does_not_take_the_charge_of_a_running_one_with_its_id(tmp_path: Path) -> None:
    """Its front has not learned its other id yet, and reports it by its own. No deficit moves."""

    def deficits() -> dict[str, Deficit]:
        policy = runs.side.host.scheduler.policy
        return {name: policy.deficit(ClientId(name), WorkerId(WORKERS[0])) for name in ("ann", "bob", "eve")}

    async with runs_in(tmp_path) as runs:
        one, two = await runs.front(1), await runs.front(2)
        await two.submit(request("same", "ann"))
        for name in "xyz":
            await two.submit(request(name, "eve"))
        waiting = one.submit(request("same", "bob"))
        await until(lambda: runs.side.host.scheduler.waiting == 1)
        await runs.state.save()
        before = deficits()
        await runs.kill()
        await runs.begin(1, 2)
        assert deficits() == before
        two.settle(Finished(RequestId("x"), Usage(100, 0, 0)))
        assert (await waiting).known_as is not None


async def test_what_a_late_front_reports_is_dispatched_nowhere_in_between(tmp_path: Path) -> None:
    """A request that one worker returned and another has goes on there, although the scheduler is no longer held."""
    async with runs_in(tmp_path) as runs:
        host, asked = runs.side.host, request("a", "ann")
        delivered: list[SchedulerMessage] = []
        late = host.connect(delivered.append, 2, "late")
        for message in (
            RanBefore(asked.id, Resumed(asked, WorkerId(WORKERS[0]), 0, saved=False)),
            Returned(asked.id, accepted=True, fault=Fault.BROKEN, usage=Usage(100, 2, 0)),
            RanBefore(asked.id, Resumed(asked, WorkerId(WORKERS[1]), 0, saved=False)),
            AllReported(5),
        ):
            late.receive(message)
        assert not any(isinstance(message, Assignment) for message in delivered)
        assert not host.scheduler.fleet.held
        assert host.scheduler.attempts[asked.id].worker.worker.id == WORKERS[1]
        late.receive(Finished(asked.id, Usage(100, 7, 0)))
        assert runs.served() == {"ann": Tokens(100, 0, 7)}


async def test_a_file_that_has_become_wrong_does_not_stop_the_next_run(tmp_path: Path) -> None:
    """It is only logged, as for the run before."""
    workers_file = tmp_path / "workers"
    workers_file.write_text("[]")
    async with runs_in(tmp_path, workers_file=workers_file) as runs:
        front = await runs.front(1)
        await runs.kill()
        workers_file.write_text("{")
        await runs.begin(1)
        assert (await front.submit(request("a", "ann"))).worker in WORKERS


async def test_a_report_counts_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """A state that is saved before a late front has reported all holds nothing of its report, which comes again."""
    async with runs_in(tmp_path) as runs:
        front = await runs.front(1)
        for name in "ab":
            await front.submit(request(name, "ann"))
        await runs.state.save()
        report = [RanBefore(RequestId("a"), Resumed(request("a", "ann"), WorkerId(WORKERS[0]), 0))]
        session = runs.side.host.covered()[0].session
        late = runs.side.host.connect(lambda _: None, 2, "late")
        for message in report:
            late.receive(message)
        assert [front.session for front in runs.side.host.covered()] == [session]
        assert runs.side.host.scheduler.live == 2
        late.receive(AllReported(5))
        assert runs.side.host.scheduler.live == 3
        assert {front.messages for front in runs.side.host.covered() if front.session == "late"} == {5}
