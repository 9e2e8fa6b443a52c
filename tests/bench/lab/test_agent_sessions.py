"""The experiment with agent sessions: what is played, and how it is measured."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.lab.agents.sessions import HEAVY_SESSIONS, LOADS, STAND_IN, AgentSessions, over_max_min
from bench.lab.frame.experiment import Row
from bench.report.records import Record, Result, ServiceSample
from bench.report.summary import summarise
from bench.workloads.parts.traffic import Outcome
from bench.workloads.recorded.sessions import LIGHT, ONE_SHOT, SessionPlay, Sessions


def names(play: SessionPlay) -> Sequence[str]:
    return [client.name for client in Sessions(STAND_IN.sessions, play).clients(0)]


def test_the_working_set_decides_how_many_sessions_are_open() -> None:
    """Twice the working set opens twice the sessions; a light client has one, and one-shot calls come on top."""
    play = SessionPlay(client_count=2, working_set=1_000_000, light=1, one_shots=0.5)
    assert names(play) == ["c1", "c2", f"{LIGHT}1", ONE_SHOT]
    once, twice = (
        sum(count for _, count in Sessions(STAND_IN.sessions, each)._open_sessions(STAND_IN.sessions))
        for each in (play, replace(play, working_set=2_000_000))
    )
    assert abs(twice - 2 * once) <= 1


def test_every_third_session_is_kept_aside() -> None:
    """What is tuned on and what is judged on share no session, and are all sessions together."""
    parts = {part: Sessions(STAND_IN.sessions, SessionPlay(part=part)).played() for part in ("all", "tuning", "aside")}
    assert len(parts["aside"]) == len(parts["all"]) // 3
    assert not set(parts["tuning"]) & set(parts["aside"])
    assert len(parts["tuning"]) + len(parts["aside"]) == len(parts["all"])


def test_each_load_is_played_under_each_policy() -> None:
    """Every load has the same policies, the uncontended fleet among them."""
    cells = [dict(cell.labels) for cell in AgentSessions().cells(quick=False)]
    by_load = {load: [cell["policy"] for cell in cells if cell["load"] == f"{load:g}"] for load in LOADS}
    assert len({tuple(policies) for policies in by_load.values()}) == 1
    assert "uncontended" in by_load[2.0]


def test_shares_are_of_the_whole_run() -> None:
    """Useful service counts from the start, so that a client has no more of it in a slow run than in a fast one only
    because its long first prompt ends after the warm-up; calls per second are those after the warm-up.
    """
    first, second = (
        Record(f"{at}", "c1", Outcome.DONE, at - 1.0, at, at, at, "w1", None, size, 0, 0, 10, fresh_tokens=size)
        for at, size in ((5.0, 900), (15.0, 60))
    )
    samples = (ServiceSample(10.0, {}, {}), ServiceSample(20.0, {}, {}))
    result = Result(20.0, 10.0, (first, second), {}, {"c1": 1.0}, samples)
    figures = AgentSessions().measure(result, summarise(result))
    assert figures["clients"] == [(0.0, (900 + 60 + 2 * 2 * 10) / 20.0)]
    assert figures["calls/s"] == 1 / 10.0


def test_what_a_perfect_cache_would_hold_is_computed_again() -> None:
    """Input that is neither cached nor new counts; cached tokens of what is new, which others may share, save none."""
    lost, shared = (
        Record(f"{fresh}", "c1", Outcome.DONE, 11.0, 11.0, 11.5, 12.0, "w1", None, 1000, 200, 0, 10, fresh_tokens=fresh)
        for fresh in (300, 900)
    )
    samples = (ServiceSample(10.0, {}, {}), ServiceSample(20.0, {}, {}))
    result = Result(20.0, 10.0, (lost, shared), {}, {"c1": 1.0}, samples)
    assert AgentSessions().measure(result, summarise(result))["again/s"] == (1000 - 200 - 300) / 10.0


def test_the_digest_says_what_more_sessions_bring() -> None:
    """The service with the most sessions is divided by that with the fewest, seed by seed: of the client that has them,
    and of the others, but for the one whose calls belong to no session.
    """
    few, many = (
        Row({"load": f"{heavy} beside 3 each", "policy": "gate"}, {"clients": [clients(*seed) for seed in seeds]})
        for heavy, seeds in zip(HEAVY_SESSIONS, (((2, 4, 4), (5, 1, 1)), ((3, 2, 2), (10, 2, 1))), strict=True)
    )
    assert AgentSessions().digest([few, many])[-1] == "| gate | 1.50, 2.00 | - | 0.50, 1.50 |"
    assert not any("fewest" in line for line in AgentSessions().digest([few]))


def test_the_digest_says_what_more_sessions_bring_to_a_share() -> None:
    """A client that wants more, where the others want little, has a larger share: growth is beside that of the share,
    which nobody need have got, and which is of all that the policy served.
    """
    rows = [
        Row({"load": f"{heavy} beside 3 each", "policy": policy}, {"clients": [clients(*served)]})
        for heavy, by_policy in zip(
            HEAVY_SESSIONS,
            ({"uncontended": (5, 3), "gate": (4, 4)}, {"uncontended": (50, 3), "gate": (12, 1)}),
            strict=True,
        )
        for policy, served in by_policy.items()
    ]
    assert AgentSessions().digest(rows)[-1] == "| gate | 3.00 | 2.00 | 0.25 |"


def clients(*served: int) -> Sequence[tuple[float, float]]:
    """Return the service of clients with sessions, and of one without."""
    return [(float(number), float(each)) for number, each in enumerate((*served, 7))]


@pytest.mark.parametrize(
    ("served", "wanted", "expected"),
    [((2.0, 2.0), (9.0, 9.0), (1.0, 1.0)), ((1.0, 3.0), (1.0, 9.0), (1.0, 1.0)), ((4.0, 0.0), (4.0, 4.0), (2.0, 0.0))],
)
def test_a_share_is_max_min(served: Sequence[float], wanted: Sequence[float], expected: Sequence[float]) -> None:
    """Nobody's share is more than it wants, and what is left is shared evenly by those that want more."""
    assert tuple(over_max_min(served, wanted)) == expected
