"""Parse slots: owners take turns, and short bodies do not wait for long ones."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from types import MappingProxyType
from typing import cast

import pytest

from router.api.body.call import Call, Head
from router.api.families import OTHER
from router.auth.identity import Identifier
from router.channel.client import SchedulerClient
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import RequestId
from router.front.byte_budget import Hold
from router.front.exchange import Exchange
from router.front.outgoing import OutgoingCall
from router.front.parsing import INLINE_BYTES, LONG_BYTES, BodyParser, ParseSlots, ParseThread, RoundRobinLock, Sender
from router.upstream.connections import UNLISTED, ConnectedWorker, ServedModel, WorkerConnections
from router.upstream.http_client import IdleTimeouts, WorkerResponse
from tests.support.running import TIMEOUT_S, until


class Work:
    """Records whose bodies were parsed; parsing blocks its thread until `release` is set."""

    def __init__(self) -> None:
        self.slots = ParseSlots()
        self.done: list[str] = []
        self.release = Event()

    def begin(self, owner: str, size: int = LONG_BYTES + 1) -> "asyncio.Future[None]":
        def work() -> None:
            assert self.release.wait(60)
            self.done.append(owner)

        return asyncio.ensure_future(self.slots.run(owner, size, work))


async def test_owners_are_parsed_in_turn() -> None:
    """Between two bodies of one owner, every other waiting owner gets a turn."""
    work = Work()
    running = [work.begin(owner) for owner in ("flood", "flood", "flood", "flood", "ann", "bob")]
    await asyncio.sleep(0)
    work.release.set()
    await asyncio.gather(*running)
    assert work.done == ["flood", "flood", "ann", "bob", "flood", "flood"]


async def test_shorter_bodies_do_not_wait_for_long_ones() -> None:
    """Shorter bodies have a thread of their own."""
    work = Work()
    long = work.begin("flood")
    others = Work()
    others.slots = work.slots
    others.release.set()
    await others.begin("ann", LONG_BYTES)
    assert others.done == ["ann"]
    assert not long.done()
    work.release.set()
    await long


async def test_a_cancelled_waiter_is_skipped() -> None:
    """A waiter can be cancelled before its turn, or in the moment of its turn."""
    work = Work()
    first, cancelled, last = (work.begin(owner) for owner in ("ann", "bob", "cyd"))
    await asyncio.sleep(0)
    cancelled.cancel()
    work.release.set()
    await asyncio.gather(first, last)
    assert work.done == ["ann", "cyd"]
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await work.begin("dan")
    assert work.done[-1] == "dan"


async def test_a_long_answer_is_read_one_part_per_turn_of_the_loop() -> None:
    """The event loop runs between the parts, however many answers are read at a time."""
    slots, parts = ParseSlots(), list[str]()

    async def read(owner: str) -> None:
        await slots.read(owner, bytes(3 * INLINE_BYTES), lambda part: parts.append(f"{owner} {len(part)}"))

    async def count_turns() -> None:
        while len(parts) < 6:
            before = len(parts)
            await asyncio.sleep(0)
            assert len(parts) <= before + 1

    await asyncio.gather(count_turns(), read("ann"), read("bob"))
    assert sorted(parts) == [f"ann {INLINE_BYTES}"] * 3 + [f"bob {INLINE_BYTES}"] * 3
    assert f"bob {INLINE_BYTES}" in parts[:3]


class OneModel:
    """Connections to workers that serve one model."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def served(self, _: str) -> ServedModel:
        return UNLISTED


async def parsed(body: bytes, content_type: str) -> tuple[Call, bool]:
    """Parse a body. Returns the call, and whether the event loop itself has parsed it."""
    threads = []

    def parse(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
        threads.append(threading.current_thread())
        return OTHER.parse(head, body, hasher, ids=ids)

    parser = BodyParser(
        ParseSlots(),
        PromptHasher(b""),
        cast(Identifier, None),
        cast(WorkerConnections, OneModel()),
        isolation=None,
        ids=False,
        strict=False,
    )
    head = Head("/v1/any", content_type=content_type)
    call, _ = await parser.parse(OTHER._replace(parse=parse), head, body, Sender({}, None, "ann"), deployment="m")
    return call, threads == [threading.current_thread()]


class AnyWorker:
    """A worker and an exchange with its client, as far as sending a call needs them."""

    @property
    def card(self) -> "AnyWorker":
        return self

    id = "w"

    async def forward(self, *_: object, **__: object) -> WorkerResponse:
        return cast(WorkerResponse, None)

    def headers_for(self, _: object) -> None: ...


async def edits_on_the_loop(call: Call) -> bool:
    """Send a call, and return whether the event loop itself has edited its body."""
    threads = []

    def encode() -> bytes:
        threads.append(threading.current_thread())
        return call.body

    exchange = cast(Exchange, AnyWorker())
    outgoing = OutgoingCall(call, RequestId("r"), exchange, cast(Hold, None), cast(SchedulerClient, None))
    worker = cast(ConnectedWorker, AnyWorker())
    await outgoing.forward(worker, call.path, encode, call.body, cast(IdleTimeouts, None))
    return threads == [threading.current_thread()]


PROSE = b"Some words, and more of them; then [some] more words. "
PART = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data; boundary=x"


@pytest.mark.interpreted("the test puts objects of its own for compiled ones")
@pytest.mark.parametrize(
    ("body", "content_type", "light"),
    [
        (b'{"messages":["' + PROSE * 900 + b'"]}', JSON_TYPE, True),
        (b'{"messages":[' + b",".join([b"{}"] * 1000) + b"]}", JSON_TYPE, True),
        (b'{"messages":[' + b",".join([b"{}"] * 21_000) + b"]}", JSON_TYPE, False),
        (b'{"prompt":[' + b",".join([b"1"] * 30_000) + b"]}", JSON_TYPE, False),
        (b'{"deep":[' + b",".join([b"[" * 500 + b"]" * 500] * 60) + b"]}", JSON_TYPE, False),
        (b"{" + b",".join([b'"%x":0' % number for number in range(6000)]) + b"}", JSON_TYPE, False),
        (PART * 20 + b"--x--\r\n", FORM_TYPE, True),
        (PART * 1000 + b"--x--\r\n", FORM_TYPE, False),
    ],
    ids=["text", "few messages", "many messages", "token ids", "deep", "wide", "short form", "many parts"],
)
async def test_a_body_is_parsed_and_edited_where_its_cost_belongs(body: bytes, content_type: str, light: bool) -> None:
    """The event loop parses and edits what takes little time. Many small members take long, however short the body."""
    assert len(body) <= INLINE_BYTES
    call, on_the_loop = await parsed(body, content_type)
    assert on_the_loop is light
    assert await edits_on_the_loop(call) is light


class Body:
    """A body that takes much memory."""


async def test_a_failed_body_is_freed_at_once() -> None:
    """An error raised in a thread is freed with its frames and their body, without the garbage collector."""

    def fail(_: Body) -> None:
        raise ValueError

    body = Body()
    gone = weakref.ref(body)
    gc.disable()
    try:
        with suppress(ValueError):
            await ParseSlots().run("a", INLINE_BYTES + 1, partial(fail, body))
        del body
        await until(lambda: gone() is None)  # the thread lets go of it just after it has reported the error
    finally:
        gc.enable()


async def test_a_lock_given_to_a_cancelled_waiter_goes_to_the_next() -> None:
    """Otherwise nothing would be parsed any more."""
    lock = RoundRobinLock()
    await lock.acquire("first")
    cancelled, next_one = asyncio.create_task(lock.acquire("leaves")), asyncio.create_task(lock.acquire("next"))
    await asyncio.sleep(0)
    lock.release()
    cancelled.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await next_one
    assert cancelled.cancelled()


async def test_a_body_whose_thread_cannot_start_lets_the_next_one_have_its_turn() -> None:
    """A machine without free threads costs that call alone."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()  # refuses work with the error of a thread that cannot start
    thread = ParseThread(executor)
    for owner in ("first", "next"):
        with pytest.raises(RuntimeError):
            async with asyncio.timeout(TIMEOUT_S):
                await thread.run(owner, bytes)
