"""What replicas share in Valkey or Redis: the lease, the highest epoch, who waits, and the scheduler's state.

Each step is one script, which the store runs whole or not at all. The store is asked in the background only, never
while a call waits for its answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from router.cluster.lease import START_SECONDS, LeaderRecord, Renewal, StoreView

ANSWER_SECONDS: Final = 1.0
"""Seconds in which the store must answer; it is tried again later. With the time between two renewals, less than the
lease lasts."""
CLOSE_SECONDS: Final = 1.0
"""Seconds for the end of connections."""
STATE_SECONDS: Final = 5.0
"""Seconds in which the store must take or give the state, which may be some megabytes."""
WAITING_SECONDS: Final = 5.0
"""Seconds after its last word in which a replica no longer counts as waiting."""

VIEW: Final = """
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[1])}
"""
"""Return the lease, the highest epoch, and the milliseconds until the lease ends."""
ACQUIRE: Final = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ (%S+)') ~= ARGV[2] then return false end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[1])) + 1
local record = string.format('%d', epoch) .. ' ' .. ARGV[3]
redis.call('SET', KEYS[2], string.format('%d', epoch))
redis.call('SET', KEYS[1], record, 'PX', ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[2])
return record
"""
"""Take the lease if nobody else holds it, with an epoch above the stored one and ARGV[1]."""
RENEW: Final = """
local stored, own = tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[2])
local held = redis.call('GET', KEYS[1])
if stored > own or (stored == own and held and held ~= ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""
"""Hold the lease for longer, unless another has led since. What a store has lost is written again."""
RAISE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if tonumber(redis.call('GET', KEYS[2]) or '0') < tonumber(ARGV[2]) then redis.call('SET', KEYS[2], ARGV[2]) end
return 1
"""
"""Have the holder of the lease store that there was this epoch."""
CLAIM: Final = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('ZREM', KEYS[2], ARGV[2])
return 1
"""
"""Store an epoch that was taken elsewhere, and that its replica waits no more."""
RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
WAIT: Final = """
local now = tonumber(redis.call('TIME')[1])
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""
"""Say that a replica waits, and return all that do."""
SAVE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[2])
elseif redis.call('HGET', KEYS[2], 'version') ~= ARGV[2] then
  return 1
end
redis.call('HSET', KEYS[2], 'version', ARGV[3], 'manifest', ARGV[4])
local gone = tonumber(ARGV[5])
for each = 6, 5 + gone do redis.call('HDEL', KEYS[2], ARGV[each]) end
for each = 6 + gone, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[each], ARGV[each + 1]) end
return 2
"""
"""Replace the version ARGV[2] of the state by the next one, if this epoch is still the highest."""


class StoreUnreachable(Exception):
    """The store does not answer, or refuses to."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is, and the name of the cluster there."""

    host: str
    port: int
    name: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False


def store_address(url: str) -> StoreAddress:
    """Return the address in a URL that `Settings.cluster` accepts."""
    parts = urlsplit(url)
    return StoreAddress(
        parts.hostname or "",
        parts.port or 6379,
        parts.path.strip("/"),
        None if parts.username is None else unquote(parts.username) or None,
        None if parts.password is None else unquote(parts.password),
        tls=parts.scheme in ("rediss", "valkeys"),
    )


class SavedElsewhere(Exception):
    """The stored state is not the one that was to be replaced: it must be saved whole."""


class SaveRefused(Exception):
    """A higher epoch is stored, or none: this leader may save nothing."""


class ClusterStore:
    """The keys of one cluster. Every method raises StoreUnreachable."""

    def __init__(self, address: StoreAddress, seconds: float = ANSWER_SECONDS) -> None:
        """`seconds`: in which the store must answer."""
        self._seconds = seconds
        self._asked: set[asyncio.Future[Any]] = set()
        self._redis: Redis = Redis(
            host=address.host,
            port=address.port,
            username=address.username,
            password=address.password,
            ssl=address.tls,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),
        )
        self._leader, self._epoch, self._waiting, self._state = [
            f"d2lpm:{{{address.name}}}:{kind}" for kind in ("leader", "epoch", "waiting", "state")
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asked in self._asked:
            asked.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*self._asked, return_exceptions=True)
                await self._redis.aclose()

    async def view(self) -> StoreView:
        """Return who holds the lease, and the highest epoch."""
        leader, epoch, left = await self._run(VIEW, [self._leader, self._epoch], [])
        try:
            record = None if leader is None else LeaderRecord.decode(leader.decode())
            return StoreView(record, int(epoch or 0), max(0, left) / 1000)  # negative: there is none, or it never ends
        except ValueError:
            raise StoreUnreachable(f"what it has under {self._leader} is not understood") from None

    async def acquire(self, wanted: LeaderRecord, floor: int) -> LeaderRecord | None:
        """Take the lease for `START_SECONDS`.

        Returns the record with its epoch, which is above `floor`; None if another holds the lease.

        `wanted`: the record, whose epoch does not count.
        """
        keys = [self._leader, self._epoch, self._waiting]
        found = await self._run(ACQUIRE, keys, [floor, wanted.replica, wanted.rest, _milliseconds(START_SECONDS)])
        return None if found is None else LeaderRecord.decode(found.decode())

    async def renew(self, record: LeaderRecord, seconds: float) -> Renewal:
        """Hold the lease for `seconds` from now on. Raises nothing."""
        given: list[str | int] = [record.encoded(), record.epoch, _milliseconds(seconds)]
        try:
            kept = await self._run(RENEW, [self._leader, self._epoch], given)
        except StoreUnreachable:
            return Renewal.UNREACHABLE
        return Renewal.KEPT if kept else Renewal.SUPERSEDED

    async def raise_epoch(self, record: LeaderRecord, epoch: int) -> None:
        """Store that there was this epoch, if the holder of this record leads."""
        await self._run(RAISE, [self._leader, self._epoch], [record.encoded(), epoch])

    async def claim(self, epoch: int, replica: str) -> None:
        """Store the epoch of a replica that leads by a lease elsewhere, unless a higher one is stored."""
        await self._run(CLAIM, [self._epoch, self._waiting], [epoch, replica])

    async def release(self, record: LeaderRecord) -> None:
        """End the lease, if the holder of this record has it."""
        await self._run(RELEASE, [self._leader], [record.encoded()])

    async def waiting(self, replica: str = "") -> Sequence[str]:
        """Return the replicas that wait for the lease. `replica`: one that says so now."""
        names = await self._run(WAIT, [self._waiting], [replica, WAITING_SECONDS])
        return [name.decode() for name in names]

    async def save(
        self, epoch: int, replaced: str, version: str, manifest: bytes, gone: Sequence[str], new: Mapping[str, bytes]
    ) -> None:
        """Replace the state by its next version. Raises SaveRefused or SavedElsewhere, and saves nothing then.

        `replaced`: the version that is stored, empty to replace whatever is; `manifest`: says in which order the pieces
        make the state; `gone`: the pieces that it no longer has; `new`: those that are not stored yet.
        """
        pairs = [part for piece in new.items() for part in piece]
        given = [str(epoch), replaced, version, manifest, len(gone), *gone, *pairs]
        outcome = await self._run(SAVE, [self._epoch, self._state], given)
        if outcome == 0:
            raise SaveRefused
        if outcome == 1:
            raise SavedElsewhere

    async def manifest(self) -> bytes | None:
        """Return the manifest of the state; None if there is no state."""
        found: bytes | None = await self._ask(self._redis.hget(self._state, "manifest"))
        return found

    async def load(self) -> Mapping[str, bytes]:
        """Return the manifest and the pieces of the state; empty if there is none."""
        found = await self._ask(self._redis.hgetall(self._state))
        return {name.decode(): value for name, value in found.items()}

    async def _run(self, script: str, keys: Sequence[str], given: Sequence[str | bytes | float]) -> Any:
        return await self._ask(self._redis.eval(script, len(keys), *keys, *given))

    async def _ask(self, answer: "Awaitable[Any] | Any") -> Any:
        """Return the answer. Who is cancelled or has waited for long enough leaves the library to itself."""
        asked = asyncio.ensure_future(cast("Awaitable[Any]", answer))
        self._asked.add(asked)
        asked.add_done_callback(self._answered)
        try:
            async with asyncio.timeout(2 * self._seconds):
                return await asyncio.shield(asked)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if isinstance(error, ResponseError):
                await self._look_up_again()
            raise StoreUnreachable(" ".join(str(error).split()) or type(error).__name__) from None

    async def _look_up_again(self) -> None:
        """Have the next question look up the store's name, and connect anew. One that refuses may have become a replica
        of the one that has its name by now, and the library would keep the connection to it.
        """
        with suppress(RedisError, OSError):
            await self._redis.connection_pool.disconnect(inuse_connections=False)

    def _answered(self, asked: "asyncio.Future[Any]") -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()  # so that asyncio does not log one that nobody waits for


def new_record(replica: str, run: str, address: str) -> LeaderRecord:
    """Return the record of a run that is to lead from now on."""
    return LeaderRecord(0, replica, run, address, time.time())


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
