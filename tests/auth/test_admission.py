"""Limits of clients and groups on calls in flight, requests and tokens per minute."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.auth.admission import Admission, AdmissionTicket
from router.auth.identity import AnonymousPolicy, ClientDirectory, ClientGroup, Identifier, Identity
from router.channel.client import SchedulerClient
from router.channel.host import SchedulerHost
from router.channel.local import connect
from router.core.clients.rate_limits import MINUTE, Bucket, ClientLimits
from router.core.fleet.stored_responses import StoredResponses
from router.core.model.events import Arrived
from router.core.model.request import ClientId, GroupId, Request, RequestId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.errors import ModelNotAllowed, Refused
from router.process.services import SchedulerServices
from router.upstream.directory import WorkerDirectory

MODEL = "m"


class Door:
    """A front's admission before the scheduler's services, and a clock that only the test moves."""

    def __init__(self, directory: ClientDirectory | None = None) -> None:
        self.now = 0.0
        scheduler = Scheduler(POLICIES["rr+fcfs"], SchedulerSettings(), Parameters(), Random(0))
        self.host = SchedulerHost(scheduler, [], lambda: self.now)
        self.services = SchedulerServices(self.host, WorkerDirectory(), StoredResponses(), lambda _: None)
        self.host.set_services(self.services)
        scheduler_client = SchedulerClient(self.host.clock)
        connect(scheduler_client, self.host, encoded=True)
        self.admission = Admission(Identifier(directory=directory or ClientDirectory()), scheduler_client)

    @asynccontextmanager
    async def admitted(self, identity: Identity, tokens: int = 0) -> AsyncIterator[AdmissionTicket]:
        """Hold a call in flight whose head does not identify its client."""
        with self.admission.ticket() as ticket:
            await self.admission.admit(ticket, identity, MODEL, tokens)
            yield ticket

    async def call(self, identity: Identity, tokens: int = 0, *, used: int | None = None) -> Refused | None:
        """Make one call that ends at once. Return its refusal, if it was refused."""
        try:
            async with self.admitted(identity, tokens) as ticket:
                ticket.tokens = used
        except Refused as refused:
            return refused
        return None

    async def name(self, user: str, address: str) -> ClientId:
        """Return the client of a call with this `user`; from then on the scheduler knows that client."""
        client = (await self.admission.identify({}, user, address)).client
        self.host.feed(Arrived(Request(RequestId(user), client, MODEL, ())))
        return client


def client(name: str = "ann", limits: ClientLimits = ClientLimits(), group: ClientGroup | None = None) -> Identity:  # noqa: B008
    return Identity(ClientId(name), limits=limits, group=group)


def team(**limits: float) -> ClientGroup:
    return ClientGroup(GroupId("team"), limits=ClientLimits(**limits))  # type: ignore[arg-type]


async def test_in_flight_is_counted_from_admission_to_the_end() -> None:
    """A call beyond the limit is refused with a reason, and a call that ends, also by an error, makes room."""
    door, ann = Door(), client(limits=ClientLimits(in_flight=1))
    with suppress(ZeroDivisionError):
        async with door.admitted(ann):
            refused = await door.call(ann)
            assert refused is not None
            assert (refused.status, refused.reason, refused.retry_after) == (429, "rejected-limit-in-flight", 1.0)
            raise ZeroDivisionError
    assert await door.call(ann) is None
    assert door.admission.refusals == {"rejected-limit-in-flight": 1}


async def test_requests_per_minute_are_limited_and_the_refusal_says_when_to_retry() -> None:
    """A minute's worth of calls is admitted at once, later ones at a steady rate, as `retry_after` says."""
    door, ann = Door(), client(limits=ClientLimits(requests_per_minute=6))
    assert [await door.call(ann) for _ in range(6)] == [None] * 6
    refused = await door.call(ann)
    assert refused is not None
    assert refused.reason == "rejected-limit-requests"
    assert refused.retry_after == pytest.approx(10.0)
    door.now = 9.9
    assert await door.call(ann) is not None
    door.now = 10.0
    assert await door.call(ann) is None


async def test_tokens_per_minute_count_the_tokens_used() -> None:
    """A call is charged its estimate, corrected at its end; after an overdraft the bucket must refill first."""
    door, ann = Door(), client(limits=ClientLimits(tokens_per_minute=600))
    assert await door.call(ann, 500, used=50) is None
    assert await door.call(ann, 500, used=1100) is None
    refused = await door.call(ann, 50)
    assert refused is not None
    assert refused.reason == "rejected-limit-tokens"
    assert refused.retry_after == pytest.approx(60.0)
    door.now = 60.0
    assert await door.call(ann, 50) is None


async def test_a_call_larger_than_the_limit_is_admitted_when_the_bucket_is_full() -> None:
    """A call larger than the bucket is admitted by a full bucket, because no bucket could ever hold enough for it."""
    door, ann = Door(), client(limits=ClientLimits(tokens_per_minute=100))
    assert await door.call(ann, 1000) is None
    assert await door.call(ann, 1) is not None
    door.now = 10 * MINUTE
    assert await door.call(ann, 1000) is None


@pytest.mark.parametrize("limits", [{"in_flight": 1}, {"requests_per_minute": 1}, {"tokens_per_minute": 10}])
async def test_a_groups_limit_is_for_all_of_its_members(limits: dict[str, float]) -> None:
    """A group's limit is used up for all its members and for nobody else, and a refused call uses up no limit."""
    door, group = Door(), team(**limits)
    ann, bob = client("ann", group=group), client("bob", ClientLimits(requests_per_minute=1), group)
    async with door.admitted(ann, 10):
        refused = await door.call(bob, 10)
        assert refused is not None
        assert "group" in refused.message
        assert await door.call(client("cyd"), 10) is None
    door.now = MINUTE
    assert await door.call(bob, 10) is None


async def test_a_model_that_the_client_may_not_call_is_refused() -> None:
    """A call to a model outside the client's list is refused with 403."""
    door = Door()
    identity = Identity(ClientId("ann"), models=frozenset({"other"}))
    with pytest.raises(ModelNotAllowed):
        await door.call(identity)


async def test_new_limits_count_at_once_and_forget_nothing_in_flight() -> None:
    """After a reload of the clients file, new limits apply to the calls that are already in flight."""
    door = Door()
    async with door.admitted(client(limits=ClientLimits(in_flight=5))):
        assert await door.call(client(limits=ClientLimits(in_flight=1))) is not None
        assert await door.call(client(limits=ClientLimits(in_flight=2))) is None


async def test_new_names_beyond_the_cap_are_identified_by_their_address() -> None:
    """Each address may introduce a number of new names per minute, and names that are known already stay valid."""
    door = Door(ClientDirectory(anonymous=AnonymousPolicy(new_per_minute=2)))
    names = [await door.name(f"u{number}", "10.0.0.1") for number in range(4)]
    assert names == ["user-u0", "user-u1", "address-10.0.0.1", "address-10.0.0.1"]
    assert await door.name("u0", "10.0.0.1") == "user-u0"
    assert await door.name("v", "10.0.0.2") == "user-v"
    door.now = MINUTE
    assert await door.name("u3", "10.0.0.1") == "user-u3"


async def test_idle_limiters_are_dropped() -> None:
    """A limiter is dropped a minute after its client's last call, however many clients have called."""
    door = Door(ClientDirectory(anonymous=AnonymousPolicy(new_per_minute=100)))
    for number in range(3000):
        door.now += 0.5
        await door.call(client(f"c{number}", ClientLimits(requests_per_minute=10)))
        await door.name(f"u{number}", f"10.0.{number // 256}.{number % 256}")
    assert len(door.services.limits._limiters) < 200
    assert len(door.services.limits._new_clients) < 200


steps = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=30)


@given(st.floats(1, 1000), steps)
def test_a_bucket_gives_no_more_than_its_rate_and_one_minute(size: float, steps: list[tuple[float, float]]) -> None:
    """What a bucket has given never exceeds one minute's worth plus what flowed in since it was created."""
    bucket, now, had = Bucket(size, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.seconds_until(amount, now) == 0 and amount <= size:
            bucket.take(amount, now)
            had += amount
        assert had <= size * (1 + now / MINUTE) * (1 + 1e-9) + 1e-6
