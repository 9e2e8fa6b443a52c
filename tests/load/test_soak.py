"""The short form of `python -m tests.chaos.soak`, and the objections that it raises."""

from collections import Counter

import pytest

from tests.chaos.soak import Look, Plan, Result, soak


async def test_a_router_holds_nothing_after_many_calls() -> None:
    """After 2800 calls of 2000 clients, files and tasks are as many as before and series about as many as after half
    of the calls; each call ended.
    """
    plan = Plan(calls=2800, regulars=20, visits=1, looks=2, flags=("--client-limit", "100"))
    result = await soak(plan)
    assert result.endings == {"answered": 2716, "left": 56, "status 400": 28}
    start, half, end = result.looks
    assert (half.descriptors, half.tasks) <= (start.descriptors, start.tasks)
    assert (end.descriptors, end.tasks) <= (start.descriptors, start.tasks)
    assert end.series <= 1.05 * half.series


@pytest.mark.parametrize(
    ("end", "objection"),
    [
        (Look(100, 104, 10, 5, 7), None),
        (Look(100, 106, 10, 5, 7), "memory"),
        (Look(100, 94, 10, 5, 7), "memory"),
        (Look(100, 100, 11, 5, 7), "descriptors"),
        (Look(100, 100, 10, 6, 7), "tasks"),
        (Look(100, 100, 10, 5, 8), "series"),
    ],
)
def test_growth_is_reported(end: Look, objection: str | None) -> None:
    """The soak objects to memory that grew by more than a twentieth since a fifth of the way, and to any other
    growth.
    """
    result = Result([Look(0, 50, 10, 5, 1), Look(10, 60, 12, 9, 5), Look(20, 100, 10, 5, 7), end])
    assert [each for each in result.objections() if objection is None or objection not in each] == []
    assert bool(result.objections()) == (objection is not None)


def test_a_broken_call_is_reported() -> None:
    """The soak also objects to a call that was refused for a reason that is not its own."""
    looks = [Look(requests, 100, 10, 5, 7) for requests in (0, 20, 100)]
    endings = Counter({"answered": 97, "status 400": 1, "a broken answer": 1, "status 503": 1})
    assert len(Result(looks, endings).objections()) == 2
