"""Parse slots: owners take turns, and short bodies do not wait for long ones."""

import asyncio
import gc
import weakref
from contextlib import suppress
from functools import partial
from threading import Event

import pytest

from router.front.parsing import INLINE_BYTES, LONG_BYTES, ParseSlots, RoundRobinLock
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
    """Shorter bodies have a thread of their own, and short ones need none."""
    work = Work()
    long = work.begin("flood")
    others = Work()
    others.slots = work.slots
    others.release.set()
    await others.begin("ann", LONG_BYTES)
    await others.begin("bob", INLINE_BYTES)
    assert others.done == ["ann", "bob"]
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
