"""The lease as an object of the Kubernetes API, a Lease of coordination.k8s.io/v1, by the rules of client-go's leader
election (k8s.io/client-go/tools/leaderelection).

- Whoever leads is `holderIdentity`; empty, and nobody does. Each writes only over the version that it has seen, so that
  of two that write at once one is refused (409), and each term adds one to `leaseTransitions`.
- A lease has ended if it has not changed for `leaseDurationSeconds` on the clock of whoever looks. What others write as
  `renewTime` is for readers only, so no clocks need to agree.
- Unlike client-go, a leader that cannot renew goes on, as `lease` says: the epoch keeps decisions apart.

The leader's record and the highest epoch are annotations, which stay when the lease is released. The state is not in
the Lease: that, and who waits, are in the store, which is told each epoch before the first save of its leader.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from math import ceil
from typing import Annotated, Final, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field

from router.cluster.lease import START_SECONDS, LeaderRecord, Renewal, StoreView
from router.cluster.store import ClusterStore, StoreUnreachable
from router.upstream.discovery.kubernetes import KubernetesApi, WatchEvent

log = logging.getLogger(__name__)

API: Final = "coordination.k8s.io/v1"
MORE_SECONDS: Final = 1
"""Seconds that a lease lasts longer than is asked for, as it is renewed more rarely. The API takes whole seconds."""
RENEW_SECONDS: Final = 1.0
"""Seconds between two renewals: a write each."""
ANSWER_SECONDS: Final = 1.0
"""Seconds in which the API must answer."""
WATCH_SECONDS: Final = 60
"""Seconds after which the API ends a watch, so that one whose connection has died unseen does not last."""
PAUSE_SECONDS: Final = 0.2
"""Seconds between a watch that has ended, or failed, and the next."""
CONFLICTS: Final = 3
"""How often a renewal that another's write has crossed is tried."""
RECORD: Final = "d2lpm-router/leader"
"""The annotation with the record of the last leader."""
EPOCH: Final = "d2lpm-router/epoch"
"""The annotation with the highest epoch."""


class LeaseSpec(BaseModel):
    """The fields of client-go's leader election."""

    model_config = ConfigDict(extra="allow", frozen=True)
    holder: Annotated[str | None, Field(alias="holderIdentity")] = None
    seconds: Annotated[int | None, Field(alias="leaseDurationSeconds")] = None
    transitions: Annotated[int | None, Field(alias="leaseTransitions")] = None
    acquired: Annotated[str | None, Field(alias="acquireTime")] = None
    renewed: Annotated[str | None, Field(alias="renewTime")] = None


class LeaseMetadata(BaseModel):
    """What is read of the metadata; the rest is written back as it was."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    version: Annotated[str | None, Field(alias="resourceVersion")] = None
    annotations: dict[str, str] | None = None


class Lease(BaseModel):
    """A Lease as the API shows it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    metadata: LeaseMetadata
    spec: LeaseSpec = LeaseSpec()

    @property
    def record(self) -> LeaderRecord | None:
        """The record of the last leader; None if none of this program has led. Raises ValueError."""
        text = (self.metadata.annotations or {}).get(RECORD)
        return None if text is None else LeaderRecord.decode(text)

    @property
    def epoch(self) -> int:
        """The highest epoch. Raises ValueError."""
        return max(
            int((self.metadata.annotations or {}).get(EPOCH, "0")), 0 if self.record is None else self.record.epoch
        )


class Observation:
    """What was last seen of the Lease, and since when it has been as it is."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        """None if there is none."""
        self._seen_at = 0.0

    def see(self, lease: Lease | None, now: float) -> None:
        """Note what the Lease says. `now`: seconds of this process's own clock, which never goes backwards."""
        if lease is None or self.lease is None or lease.metadata.version != self.lease.metadata.version:
            self._seen_at = now
        self.lease = lease

    def seconds_left(self, now: float) -> float:
        """Return in how many seconds the lease ends if it does not change; 0 if it is free, or has ended."""
        if self.lease is None or not self.lease.spec.holder:
            return 0.0
        return max(0.0, self._seen_at + (self.lease.spec.seconds or 0) - now)

    def leader(self, now: float) -> LeaderRecord | None:
        """Return who holds the lease; None if it is free, or has ended. Raises ValueError if that is not understood.

        A holder that has left no record is another program, whose lease this is.
        """
        lease = self.lease
        if lease is None or not self.seconds_left(now):
            return None
        if (record := lease.record) is None:
            raise ValueError(f"the Lease is held by {lease.spec.holder}, which is no replica")
        return record


class KubernetesLease:
    """The lease of one cluster. Every method raises StoreUnreachable, as those of `ClusterStore` do."""

    def __init__(
        self, api: KubernetesApi, name: str, store: ClusterStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: of the Lease; `store`: has the state, and who waits; `clock`: seconds, never backwards."""
        self._api = api
        self._name = name
        self._store = store
        self._clock = clock
        self._seen = Observation()
        self._failure: str | None = "it was not asked yet"
        """Why the Lease is not known; None while it is."""
        self._renewed_at = -RENEW_SECONDS
        self._claim: asyncio.Task[None] | None = None
        self._store_failing = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Read the Lease, and follow it."""
        self._http = await self._stack.enter_async_context(await self._api.client(ANSWER_SECONDS))
        await self._stack.enter_async_context(self._store)
        await self._look()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *leaving: object) -> None:
        """Follow it no more."""
        tasks = [task for task in (self._task, self._claim) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def view(self) -> StoreView:
        """Return who holds the lease, and the highest epoch, as the watch has shown them."""
        if self._failure is not None:
            raise StoreUnreachable(self._failure)
        lease, now = self._seen.lease, self._clock()
        try:
            return StoreView(self._seen.leader(now), 0 if lease is None else lease.epoch, self._seen.seconds_left(now))
        except ValueError as error:
            raise StoreUnreachable(str(error)) from None

    async def acquire(self, wanted: LeaderRecord, floor: int) -> LeaderRecord | None:
        """Take the lease for `START_SECONDS`, as `ClusterStore.acquire` does."""
        await self._read()
        held = (await self.view()).leader
        if held is not None and held.replica != wanted.replica:
            return None
        lease = self._seen.lease
        record = replace(wanted, epoch=max(0 if lease is None else lease.epoch, floor) + 1)
        record = LeaderRecord.decode(record.encoded())  # as it will be read: its time is rounded
        if not await self._write(_taken(lease, self._new, record)):
            return None
        try:
            await self._store.claim(record.epoch, record.replica)
        except StoreUnreachable:
            await self.release(record)  # so that a replica that reaches the store can lead
            raise
        return record

    async def renew(self, record: LeaderRecord, seconds: float) -> Renewal:
        """Hold the lease for `seconds` and one second more, from now on. Raises nothing.

        A store that does not answer counts as one that has the lease.
        """
        try:
            for _ in range(CONFLICTS):
                lease = self._seen.lease
                if lease is not None and _superseded(lease, record):
                    return Renewal.SUPERSEDED
                if self._failure is None and lease is not None and self._clock() < self._renewed_at + RENEW_SECONDS:
                    return Renewal.UNREACHABLE if self._store_failing else Renewal.KEPT
                if await self._write(_held(lease, self._new, record, ceil(seconds) + MORE_SECONDS)):
                    self._renewed_at = self._clock()
                    if self._claim is None or self._claim.done():
                        self._claim = asyncio.create_task(self._claim_again(record))
                    return Renewal.UNREACHABLE if self._store_failing else Renewal.KEPT
                await self._read()
        except (StoreUnreachable, ValueError):
            return Renewal.UNREACHABLE
        return Renewal.UNREACHABLE

    async def _claim_again(self, record: LeaderRecord) -> None:
        """Tell the store the epoch, which it may have lost. The lease is renewed meanwhile, however long that takes."""
        try:
            await self._store.claim(record.epoch, record.replica)
            self._store_failing = False
        except StoreUnreachable:
            self._store_failing = True

    async def raise_epoch(self, record: LeaderRecord, epoch: int) -> None:
        """Write that there was this epoch, if the holder of this record leads."""
        lease = await self._read()
        if lease is not None and lease.record == record and lease.epoch < epoch:
            await self._write(_annotated(lease, {EPOCH: str(epoch)}))

    async def release(self, record: LeaderRecord) -> None:
        """End the lease, if the holder of this record has it."""
        lease = await self._read()
        if lease is not None and lease.spec.holder and lease.record == record:
            await self._write(_with(lease, holderIdentity="", leaseDurationSeconds=1, renewTime=_now()))

    async def waiting(self, replica: str = "") -> Sequence[str]:
        """Return the replicas that wait for the lease. `replica`: one that says so now."""
        return await self._store.waiting(replica)

    async def manifest(self) -> bytes | None:
        """Return the manifest of the state in the store; None if there is no state."""
        return await self._store.manifest()

    @property
    def _new(self) -> Lease:
        return Lease(metadata=LeaseMetadata(name=self._name))

    @property
    def _path(self) -> str:
        return f"/apis/{API}/namespaces/{self._api.namespace}/leases"

    async def _read(self) -> Lease | None:
        """Ask for the Lease."""
        answer = await self._ask("GET", f"{self._path}/{self._name}")
        self._see(None if answer.status_code == httpx.codes.NOT_FOUND else _parsed(answer))
        return self._seen.lease

    async def _write(self, lease: Lease) -> bool:
        """Create the Lease, or replace the version that it names. Returns False if that is no longer the last one."""
        body = {"apiVersion": API, "kind": "Lease", **lease.model_dump(mode="json", by_alias=True, exclude_none=True)}
        if lease.metadata.version is None:
            answer = await self._ask("POST", self._path, body)
        else:
            answer = await self._ask("PUT", f"{self._path}/{self._name}", body)
        if answer.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND):
            return False
        self._see(_parsed(answer))
        return True

    def _see(self, lease: Lease | None) -> None:
        self._seen.see(lease, self._clock())
        self._failure = None

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        """Make a call. Refusals that the caller knows are returned: there is no such Lease, or a newer version."""
        try:
            answer = await self._http.request(method, path, json=body, headers=await self._api.headers())
            if answer.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
                answer.raise_for_status()
        except (httpx.HTTPError, OSError) as error:
            self._failure = _said(error)
            raise StoreUnreachable(self._failure) from None
        return answer

    async def _look(self) -> None:
        """Ask for the Lease; `view` says it if there is no answer."""
        try:
            await self._read()
        except StoreUnreachable:
            return

    async def _follow(self) -> None:
        """Watch the Lease until the task is cancelled."""
        while True:
            try:
                await self._watch()
            except (httpx.HTTPError, OSError, ValueError) as error:
                self._failure = _said(error)
            await asyncio.sleep(PAUSE_SECONDS)
            await self._look()

    async def _watch(self) -> None:
        """Follow the changes of the Lease until the API ends the watch. Raises ValueError if it shows no Lease."""
        params = {"fieldSelector": f"metadata.name={self._name}", "watch": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = httpx.Timeout(ANSWER_SECONDS, read=WATCH_SECONDS + ANSWER_SECONDS)
        headers = await self._api.headers()
        async with self._http.stream("GET", self._path, params=params, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event = WatchEvent.model_validate_json(line)
                if event.type == "ERROR":
                    return
                if event.type != "BOOKMARK":
                    self._see(None if event.type == "DELETED" else Lease.model_validate(event.object))


def _superseded(lease: Lease, record: LeaderRecord) -> bool:
    """Return whether another has led since this record was written. Raises ValueError."""
    other = lease.spec.holder and lease.record != record
    return lease.epoch > record.epoch or (lease.epoch == record.epoch and bool(other))


def _taken(lease: Lease | None, new: Lease, record: LeaderRecord) -> Lease:
    """Return the Lease of a new leader."""
    transitions = 0 if lease is None else (lease.spec.transitions or 0) + 1
    fields = {"acquireTime": _now(), "leaseTransitions": transitions}
    return _with(_annotated(lease or new, _notes(record)), **fields, **_holding(record, round(START_SECONDS)))


def _held(lease: Lease | None, new: Lease, record: LeaderRecord, seconds: int) -> Lease:
    """Return the Lease of a leader that holds it for `seconds` from now on, or lost it with the data of the API."""
    fields: dict[str, object] = {} if lease is not None else {"acquireTime": _now(), "leaseTransitions": 0}
    return _with(_annotated(lease or new, _notes(record)), **fields, **_holding(record, seconds))


def _holding(record: LeaderRecord, seconds: int) -> Mapping[str, object]:
    return {"holderIdentity": record.replica, "leaseDurationSeconds": seconds, "renewTime": _now()}


def _notes(record: LeaderRecord) -> Mapping[str, str]:
    return {RECORD: record.encoded(), EPOCH: str(record.epoch)}


def _annotated(lease: Lease, notes: Mapping[str, str]) -> Lease:
    metadata = lease.metadata.model_copy(update={"annotations": {**(lease.metadata.annotations or {}), **notes}})
    return lease.model_copy(update={"metadata": metadata})


def _with(lease: Lease, **fields: object) -> Lease:
    spec = LeaseSpec.model_validate({**lease.spec.model_dump(by_alias=True), **fields})
    return lease.model_copy(update={"spec": spec})


def _now() -> str:
    """Return the time of day as the API writes it, with microseconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _parsed(answer: httpx.Response) -> Lease:
    """Return the Lease in an answer. Raises StoreUnreachable."""
    try:
        return Lease.model_validate_json(answer.content)
    except ValueError:
        raise StoreUnreachable("the Kubernetes API shows no Lease") from None


def _said(error: Exception) -> str:
    """Return what went wrong, in one line."""
    return "the Kubernetes API: " + ((str(error) or type(error).__name__).splitlines()[0])
