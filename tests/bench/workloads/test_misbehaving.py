"""Misbehaving clients and mixes: the workloads are those of the papers' experiments."""

from dataclasses import replace

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario
from bench.workloads.combined import Combined, Misbehaving
from bench.workloads.judge import Judge
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Call, Rated
from bench.workloads.registry import WORKLOADS
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.tree_of_thoughts import TreeOfThoughts
from tests.core.played import played

FIGURE_7 = ("tot-s1", "tot-s2", "judge-s1", "judge-s2", "qa-s1", "qa-s2")


def misbehaving(name: str) -> Misbehaving:
    workload = WORKLOADS[name]
    assert isinstance(workload, Misbehaving)
    return workload


def by_client(workload: Combined, count: int = 400) -> dict[str, list[tuple[float, Call]]]:
    return {client.name: played(client, count) for client in workload.clients(1)}


@pytest.mark.parametrize("name", [*FIGURE_7, "tot-fig9"])
def test_one_client_misbehaves_beside_others(name: str) -> None:
    """The heavy client differs only as in table 3, and has the others' program rate, except in long-context QA's S1."""
    workload = misbehaving(name)
    assert [client.name for client in workload.clients(1)] == ["heavy", "light-1", "light-2"]
    heavy, light = workload.heavy, workload.light
    each = light.rate / light.client_count
    assert heavy.rate / heavy.client_count == pytest.approx(4 * each if name == "qa-s1" else each)
    different = {
        "tot-s1": {"branches": 4},
        "tot-s2": {"question_times": 10.0},
        "judge-s1": {"dimensions": 16},
        "judge-s2": {"extra": 600},
        "qa-s1": {},
        "qa-s2": {"prefix_times": 2.0},
        "tot-fig9": {"question_times": 10.0},
    }[name]
    assert heavy == replace(light, client_count=1, rate=heavy.rate, **different)  # type: ignore[arg-type]


def test_figure_7_is_table_3() -> None:
    """A tree has 30 calls, or 340 if heavy, and 120 in figure 9; an article has 3, or 17 if heavy."""
    sizes = {
        name: [calls[0][1].program_calls for calls in by_client(misbehaving(name), 2).values()]
        for name in ("tot-s1", "tot-s2", "judge-s1", "judge-s2", "tot-fig9")
    }
    assert sizes == {
        "tot-s1": [340, 30, 30],
        "tot-s2": [30, 30, 30],
        "judge-s1": [17, 3, 3],
        "judge-s2": [3, 3, 3],
        "tot-fig9": [120, 120, 120],
    }


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (TreeOfThoughts(rate=1.0, client_count=3), {"rate": 2.0, "client_count": 1}),
        (TreeOfThoughts(concurrency=1, client_count=3), {"concurrency": 8, "client_count": 1}),
        (Judge(rate=1.0, client_count=3), {"dimensions": 5, "extra": 100}),
        (SharedPrefix(rate=1.0, client_count=3), {"prefix_times": 3.0, "popularity": 1.1}),
    ],
)
def test_any_family_may_misbehave(good: RatedWorkload, bad: dict[str, object]) -> None:
    """A heavy client can differ by rate, by concurrency or by any parameter of its family."""
    workload = Misbehaving(heavy=replace(good, **bad), light=good)  # type: ignore[arg-type]
    records = simulate(Scenario("d2lpm", workload, seconds=4.0, seed=2)).records
    assert {record.client for record in records} > {"light-1", "light-2", "light-3"}


def test_parts_draw_independent_random_numbers() -> None:
    """Clients of two equal parts call at different times and with different prompts."""
    part = SharedPrefix(rate=1.0, client_count=1)
    heavy, light = by_client(Misbehaving(heavy=part, light=part), 10).values()
    assert not {at for at, _ in heavy} & {at for at, _ in light}
    assert not {call.prompt.tokens[:8] for _, call in heavy} & {call.prompt.tokens[:8] for _, call in light}


def test_a_rate_is_divided_as_the_parts_rates_are() -> None:
    """A total rate is divided in proportion to the parts' rates, and is refused if a part has none."""
    workload = misbehaving("qa-s1").at_rate(12.0)
    made = by_client(workload, 1000)
    assert 1000 / made["heavy"][-1][0] == pytest.approx(8.0, rel=0.1)
    assert 1000 / made["light-1"][-1][0] == pytest.approx(2.0, rel=0.1)
    part = SharedPrefix(concurrency=1)
    assert Misbehaving(heavy=part, light=part).clients(1)
    with pytest.raises(ValueError, match="a rate"):
        Misbehaving(heavy=part, light=part, rate=3.0)


def test_workloads_with_a_rate_accept_another() -> None:
    """Every family takes a rate, also in place of a concurrency or of times; only the listed workloads do not."""
    assert SharedPrefix(concurrency=3).at_rate(2.0) == SharedPrefix(rate=2.0)
    assert SharedPrefix(times=(1.0, 2.0)).at_rate(2.0) == SharedPrefix(rate=2.0)
    without = {name for name, workload in WORKLOADS.items() if not isinstance(workload, Rated)}
    suites = {name for name in WORKLOADS if name.startswith("vtc-")}
    assert without == {"heavy-light", "liars", "own-documents", "servegen-mid", *suites}


def test_figure_8_has_a_client_that_reforms() -> None:
    """Two clients call eight times as often as two others, until one of them slows down to the others' rate."""
    workload = WORKLOADS["arena-fig8"]
    assert isinstance(workload, Combined)
    made = by_client(workload, 3200)
    assert list(made) == ["heavy", "light-1", "light-2", "reformed"]

    def sessions(name: str, begin: float, end: float) -> int:
        return sum(begin <= at < end and at == call.at for at, call in made[name]) if name else 0

    for name in ("heavy", "reformed"):
        assert sessions(name, 0, 300) > 5 * sessions("light-1", 0, 300)
    assert sessions("reformed", 300, 600) < 2 * sessions("light-1", 300, 600)
    assert sessions("heavy", 300, 600) > 5 * sessions("reformed", 300, 600)


def test_figure_12_mixes_conversations_and_programs() -> None:
    """Two clients chat, one runs trees of thoughts, and one runs the judge."""
    workload = WORKLOADS["mix"]
    assert isinstance(workload, Combined)
    made = by_client(workload, 40)
    assert {name: calls[0][1].program_calls for name, calls in made.items()} == {
        "chat-1": 1,
        "chat-2": 1,
        "trees": 30,
        "judge": 3,
    }
