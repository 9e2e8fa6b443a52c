"""The judgement of `python -m tests.chaos.kills`: what a kill explains, and whether the books are exact."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.chaos.asks import Ask, Asks
from tests.chaos.clients import Outcome
from tests.chaos.kills import SCHEDULER, STEP_TOKENS, Kill, Plan, Result, accounts, judged
from tests.chaos.reading import Ending, Verdict

FRONT = Kill("front-1", 10.0, held=1, ready=0.1, whole=1.0)
OTHER = Kill(SCHEDULER, 20.0, held=0, ready=1.0, whole=1.0)
COMPLETE = Verdict(Ending.COMPLETE)
CUT = Verdict(Ending.WRONG, "cut")
REFUSED = Verdict(Ending.ERROR, "429")
ASKS = iter(Asks("ann", Random(0), shared=False).next, None)
ASK: Ask = next(ask for ask in ASKS if ask.streamed and len(ask.texts) == 1 and ask.output_tokens > STEP_TOKENS + 1)


def outcome(sent: float, ended: float, verdict: Verdict = COMPLETE, received: int = 0) -> Outcome:
    return Outcome(ASK, "ann.1", sent, ended, verdict, received)


def charged(extend: int, output: int) -> dict[str, Any]:
    """The page /fairness of one client that was charged so."""
    return {"clients": {"user-ann": {"service": {"extend": extend, "cached": 0, "output": output}}}}


def test_both_kinds_are_killed_equally_often() -> None:
    """Every 20 s of ten minutes, in turn."""
    kills = Plan().kills
    assert len(kills) == 59
    assert kills[:4] == [(10.0, "front-1"), (20.0, SCHEDULER), (30.0, "front-2"), (40.0, SCHEDULER)]


@pytest.mark.parametrize(
    ("broken", "explained"),
    [
        (outcome(9.0, 10.1, CUT), True),
        (outcome(9.0, 9.9, CUT), False),
        (outcome(9.0, 12.0, CUT), False),
        (outcome(10.5, 10.6, CUT), False),
        (outcome(19.0, 20.1, CUT), False),
        (outcome(20.5, 20.6, REFUSED), True),
        (outcome(19.0, 20.6, REFUSED), False),
        (outcome(21.5, 21.6, REFUSED), False),
    ],
)
def test_a_kill_explains_only_what_it_can(broken: Outcome, explained: bool) -> None:
    """Only a front takes calls with it, and only then; what waits for the scheduler is not refused."""
    calls = judged([outcome(1.0, 2.0), broken], [FRONT, OTHER])
    assert bool(calls.lost) == (not explained)
    assert len(calls.cut) + len(calls.refused) == explained


def test_more_cut_calls_than_the_front_had_are_a_violation() -> None:
    """Then a front that was not killed has lost some."""
    broken = [outcome(9.0, 10.1, CUT), outcome(9.5, 10.1, CUT)]
    for held, violations in ((2, 0), (1, 1)):
        kills = [replace(FRONT, held=held)]
        assert len(Result(kills, broken, judged(broken, kills), [], [], 0).objections) == violations


@pytest.mark.parametrize(
    ("extend", "output", "exact"), [(0, 0, True), (1, 0, False), (-1, 0, False), (0, 1, False), (0, -1, False)]
)
def test_the_books_of_whole_answers_are_exact_to_the_token(extend: int, output: int, exact: bool) -> None:
    """A client with complete answers was charged their usage, and a difference of one token is a violation."""
    page = charged(2 * ASK.prompt_tokens + extend, 2 * ASK.output_tokens + output)
    [account] = accounts(page, [outcome(1.0, 2.0)] * 2, [])
    assert bool(account.objections) == (not exact)


def test_a_cut_stream_may_differ_by_one_report() -> None:
    """Of its output, in both directions; its input is estimated, and charged if it has begun."""
    broken = outcome(9.0, 10.1, CUT, received=STEP_TOKENS + 1)
    for output, exact in ((0, False), (1, True), (STEP_TOKENS + 1, True), (ASK.output_tokens + 1, False)):
        [account] = accounts(charged(ASK.prompt_tokens, output), [broken], [broken])
        assert bool(account.objections) == (not exact), output
    for extend, exact in ((0, False), (ASK.prompt_tokens * 4 // 5, True), (2 * ASK.prompt_tokens, False)):
        [account] = accounts(charged(extend, 5), [broken], [broken])
        assert bool(account.objections) == (not exact), extend
