"""Plays a client's calls without a simulator: every call is answered a second after it came."""

import heapq
from collections.abc import Callable
from itertools import count

from bench.traffic import Call, Client, Ending, Outcome


def played(
    client: Client, most: int, outcome: Callable[[Call], Outcome] = lambda _: Outcome.DONE
) -> list[tuple[float, Call]]:
    """The first so many calls in order of their arrival, each with its time."""
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
        for following in call.then(call, Ending(how, at + 1, answer)) if call.then is not None else ():
            plan(following, at + 1)
    return calls
