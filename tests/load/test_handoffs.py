"""Calls survive the faults of prefill and decode workers: the short form of `python -m tests.chaos.handoffs`."""

from pathlib import Path

from tests.chaos.handoffs import Plan, Work, run
from tests.chaos.reading import Ending

SHORT = Plan(
    trouble=3.0,
    calm=1.0,
    quiet=16,
    every=1.0,
    prefill=2,
    decode=2,
    clients=10,
    greedy=4,
    lease=7.0,
    oldest=2.0,
    step=40.0,
)


async def test_nothing_is_lost_between_prefill_and_decode(tmp_path: Path) -> None:
    """Each call gets the right bytes if it can be served, charges are what engines computed, and nothing is left."""
    result = await run(SHORT, tmp_path)
    assert not result.objections, "\n".join(result.objections)
    assert result.handoffs["decoded"] > SHORT.quiet
    assert result.judgement.endings[Ending.COMPLETE] > 10


def test_a_charge_for_what_no_engine_computed_is_a_violation() -> None:
    """And the reverse; a decode worker may compute one token of each prompt that it fetches."""
    assert Work(extend=100, output=50, computed=103, generated=50, handed_over=3, again=0).objections == []
    assert len(Work(extend=100, output=50, computed=104, generated=50, handed_over=3, again=0).objections) == 1
    assert len(Work(extend=101, output=51, computed=100, generated=50, handed_over=3, again=0).objections) == 2
    assert Work(extend=100, output=50, computed=300, generated=50, handed_over=3, again=1).objections == []
