"""Plays a client's calls without a simulator."""

import heapq
from collections.abc import Callable
from itertools import count

from bench.workloads.parts.traffic import Call, Client, Ending, Outcome


def played(
    client: Client,
    most: int,
    outcome: Callable[[Call], Outcome] = lambda _: Outcome.DONE,
    seconds: Callable[[Call], float] = lambda _: 1.0,
) -> list[tuple[float, Call]]:
    """Return the first calls in order of their arrival, each with its time; `seconds` is how long each call takes."""
    serial = count()
    unasked = iter(client.calls)
    due: list[tuple[float, int, Call]] = []
    calls: list[tuple[float, Call]] = []

    def plan(call: Call | None, now: float) -> None:
        if call is not None:
            heapq.heappush(due, (max(call.at, now), next(serial), call))

    plan(upcoming := next(unasked, None), 0.0)
    while due and len(calls) < most:
        at, _, call = heapq.heappop(due)
        if call is upcoming:
            plan(upcoming := next(unasked, None), at)
        calls.append((at, call))
        how = outcome(call)
        answer = tuple(range(call.sample, call.sample + call.output_tokens)) if how is Outcome.DONE else ()
        end = at + seconds(call)
        for following in call.then(call, Ending(how, end, answer)) if call.then is not None else ():
            plan(following, end)
    return calls
