"""Whose turn it is to be parsed."""

import asyncio
import gc
import weakref
from contextlib import suppress
from functools import partial
from threading import Event

import pytest

from router.front.parse_slots import INLINE_BYTES, LONG_BYTES, ParseSlots, RoundRobinLock


class Work:
    """Notes who was parsed, and keeps its thread until it is told to go on."""

    def __init__(self) -> None:
        self.slots = ParseSlots()
        self.done: list[str] = []
        self.go_on = Event()

    def begin(self, owner: str, size: int = LONG_BYTES + 1) -> "asyncio.Future[None]":
        def work() -> None:
            assert self.go_on.wait(60)
            self.done.append(owner)

        return asyncio.ensure_future(self.slots.run(owner, size, work))


async def test_owners_are_parsed_in_turn() -> None:
    """One that has sent many bodies waits for each other owner between two of its own."""
    work = Work()
    running = [work.begin(owner) for owner in ("flood", "flood", "flood", "flood", "ann", "bob")]
    await asyncio.sleep(0)
    work.go_on.set()
    await asyncio.gather(*running)
    assert work.done == ["flood", "flood", "ann", "bob", "flood", "flood"]


async def test_shorter_bodies_do_not_wait_for_long_ones() -> None:
    """They have a thread of their own, and short ones need none."""
    work = Work()
    long = work.begin("flood")
    others = Work()
    others.slots = work.slots
    others.go_on.set()
    await others.begin("ann", LONG_BYTES)
    await others.begin("bob", INLINE_BYTES)
    assert others.done == ["ann", "bob"]
    assert not long.done()
    work.go_on.set()
    await long


async def test_who_does_not_wait_any_more_is_passed_over() -> None:
    """Whether it leaves before its turn or as that comes."""
    work = Work()
    first, leaves, last = (work.begin(owner) for owner in ("ann", "bob", "cyd"))
    await asyncio.sleep(0)
    leaves.cancel()
    work.go_on.set()
    await asyncio.gather(first, last)
    assert work.done == ["ann", "cyd"]
    with pytest.raises(asyncio.CancelledError):
        await leaves
    await work.begin("dan")
    assert work.done[-1] == "dan"


async def test_a_long_answer_is_read_in_parts_of_a_turn_each() -> None:
    """So the loop comes round between them, however many are read at a time."""
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
    """What takes much memory."""


async def test_what_failed_is_kept_by_nobody() -> None:
    """An error that a thread raised is freed with its frames, and the body in them, before any search for cycles."""

    def fail(_: Body) -> None:
        raise ValueError

    body = Body()
    gone = weakref.ref(body)
    gc.disable()
    try:
        with suppress(ValueError):
            await ParseSlots().run("a", INLINE_BYTES + 1, partial(fail, body))
        del body
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


async def test_a_turn_that_came_as_its_owner_left_goes_to_the_next() -> None:
    """Or nothing would be parsed any more."""
    turns = RoundRobinLock()
    await turns.acquire("first")
    leaves, next_one = asyncio.create_task(turns.acquire("leaves")), asyncio.create_task(turns.acquire("next"))
    await asyncio.sleep(0)
    turns.release()
    leaves.cancel()
    async with asyncio.timeout(5):
        await next_one
    assert leaves.cancelled()
