"""Ten times more calls than the fleet can serve: `python -m tests.chaos.overload [--seconds S] [--factor F]`.

The first phase keeps as many calls in flight as the workers can run, which measures their capacity. The second phase
offers a little more than the capacity, and the third ten times as much; a few light clients call beside the flood. The
exit code is 0 if the flood costs only its senders: the throughput stays the same, surplus calls are refused at once,
and light clients wait no longer than before. The load runs in its own process, and the report says which calls were
sent late and how much of a core the router used.
"""

import argparse
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import uvloop

from bench.report.progress import ProgressBar
from router.runtime.open_files import raise_limit

from .fleet import Process, routed
from .load import Crowd, Load
from .phases import Phase, measured, objections, table

WORKERS: Final = 2
BATCH: Final = 8
"""Requests that a worker runs at once."""
WORKER_FLAGS: Final = ("--hardware", "a100-mistral-7b", "--max-running", str(BATCH))
ROUTER_FLAGS: Final = ("--max-queued", "400", "--heartbeat", "0")
CAPACITY_SHARE: Final = 1 / 3
"""Duration of the phase that measures the capacity, as a share of the other two."""
MORE: Final = 1.3
"""The load to which overload is compared, as a multiple of the capacity."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of each phase and how long it lasts."""

    seconds: float = 60.0
    """Seconds of each load that are measured."""
    warm_up: float = 10.0
    """Seconds before those, in which the queue fills."""
    factor: float = 10.0
    """The overload, as a multiple of the capacity."""
    crowd: Crowd = field(default_factory=Crowd)

    @property
    def all_seconds(self) -> float:
        """Seconds of the three phases."""
        return 3 * self.warm_up + (2 + CAPACITY_SHARE) * self.seconds


@dataclass(frozen=True, slots=True)
class Mark:
    """The state at the boundary of two phases."""

    time: float
    cpu_seconds: float


class Run:
    """The phases in turn, with one router."""

    def __init__(self, plan: Plan, router: Process, show: Callable[[float], None]) -> None:
        """`show` is called from time to time with the seconds that have passed."""
        self._plan = plan
        self._router = router
        self._show = show
        self._load = Load(router.address, plan.crowd)
        self._over = 0.0

    async def run(self) -> list[Phase]:
        """Run all phases; return the measurements of each."""
        plan, load = self._plan, self._load
        first = await self._phase(
            lambda s, show: load.keep(2 * WORKERS * BATCH, s, show), CAPACITY_SHARE * plan.seconds
        )
        capacity = sum(first[0].time <= each.reply.ended < first[1].time for each in load.called) / (
            first[1].time - first[0].time
        )
        plateau = await self._phase(lambda s, show: load.offer(MORE * capacity, s, show), plan.seconds)
        overload = await self._phase(lambda s, show: load.offer(plan.factor * capacity, s, show), plan.seconds)
        await load.end()
        return [
            measured(name, load.called, begin.time, end.time, end.cpu_seconds - begin.cpu_seconds)
            for name, (begin, end) in (
                *(("capacity", first), (f"x {MORE:g}", plateau), (f"x {plan.factor:g}", overload)),
            )
        ]

    async def _phase(
        self, offer: Callable[[float, Callable[[float], None]], Awaitable[None]], seconds: float
    ) -> tuple[Mark, Mark]:
        """Offer the load for the warm-up and then for `seconds`; return the marks at the begin and end of the
        latter.
        """
        await self._part(offer, self._plan.warm_up)
        begin = self._mark()
        await self._part(offer, seconds)
        return begin, self._mark()

    async def _part(self, offer: Callable[[float, Callable[[float], None]], Awaitable[None]], seconds: float) -> None:
        await offer(seconds, lambda now: self._show(self._over + now))
        self._over += seconds

    def _mark(self) -> Mark:
        return Mark(time.monotonic(), self._router.cpu_seconds)


async def overload(plan: Plan, show: Callable[[float], None] = lambda _: None) -> list[Phase]:
    """Run the processes and all phases."""
    async with routed(WORKERS, WORKER_FLAGS, ROUTER_FLAGS) as (router, _):
        return await Run(plan, router, show).run()


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="measured with each load (%(default)g)")
    parser.add_argument("--factor", type=float, default=Plan().factor, help="times the capacity (%(default)g)")
    options = parser.parse_args()
    plan = Plan(options.seconds, factor=options.factor)
    raise_limit()
    bar = ProgressBar(sys.stderr, "s")
    phases = uvloop.run(overload(plan, lambda now: bar.show(now, plan.all_seconds)))
    bar.close()
    print(table(phases))
    found = objections(*phases)
    for objection in found:
        print(f"violation: {objection}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
