"""The VTC paper's suites: the rates over time, lengths and weights of its figures."""

from itertools import islice, takewhile

import pytest

from bench.workloads.papers.vtc import VTC_SUITES, Sender, Stretch, Suite, steady
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Call

MINUTES = 15


def by_minute(suite: Suite) -> dict[str, list[int]]:
    """Return each client's number of calls in each of the first minutes."""
    return {
        client.name: [counts.count(m) for m in range(MINUTES)]
        for client in suite.clients(1)
        for counts in [[int(call.at // 60) for call in takewhile(lambda call: call.at < 60 * MINUTES, client.calls)]]
    }


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("vtc-overload", {"c1": [90] * 15, "c2": [180] * 15}),
        ("vtc-proportional", {"c1": [15] * 15, "c2": [30] * 15, "c3": [90] * 15}),
        ("vtc-on-off-less", {"c1": [30, 0] * 7 + [30], "c2": [120] * 15}),
        ("vtc-on-off-overload", {"c1": [120, 0] * 7 + [120], "c2": [180] * 15}),
        ("vtc-shift", {"c1": [30, 0, 30, 0, 30] + [60] * 5 + [30] * 5, "c2": [120] * 5 + [60] * 5 + [90] * 5}),
        (
            "vtc-overload-multi",
            {f"c{n}": [24 if n < 4 else 36] * 15 for n in range(1, 9)},
        ),
        ("vtc-weighted", {"c1": [48] * 15, "c2": [48] * 15, "c3": [72] * 15, "c4": [96] * 15}),
    ],
)
def test_evenly_spaced_suites(name: str, counts: dict[str, list[int]]) -> None:
    """The calls a minute are those of the figures, within one."""
    made = by_minute(VTC_SUITES[name])
    assert made.keys() == counts.keys()
    for client, each in counts.items():
        assert made[client] == pytest.approx(each, abs=1), client


def test_the_rising_client() -> None:
    """In figure 9 one client's 30 calls a minute compete with one that rises from 12 to 120 in ten minutes."""
    made = by_minute(VTC_SUITES["vtc-increase"])
    assert made["c1"] == pytest.approx([30] * 15, abs=1)
    assert made["c2"] == pytest.approx([12 + 10.8 * (minute + 0.5) for minute in range(10)] + [120] * 5, abs=1)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("vtc-short-long", [(64, 64), (256, 256)]), ("vtc-prefill-decode", [(64, 512), (512, 64)])],
)
def test_poisson_suites(name: str, lengths: list[tuple[int, int]]) -> None:
    """In figures 7 and 8 the clients make 480 and 90 calls a minute, of different lengths."""
    made = by_minute(VTC_SUITES[name])
    assert [sum(counts) / MINUTES for counts in made.values()] == pytest.approx([480, 90], rel=0.07)
    assert len(set(made["c2"])) > 5
    firsts = [next(iter(client.calls)) for client in VTC_SUITES[name].clients(1)]
    assert [(len(call.prompt), call.output_tokens) for call in firsts] == lengths


@pytest.mark.parametrize(("name", "length"), [("vtc-overload", 256), ("vtc-512", 512), ("vtc-768", 768)])
def test_lengths_of_figure_14(name: str, length: int) -> None:
    """Each suite of figure 14 has its length as input and output."""
    for client in VTC_SUITES[name].clients(1):
        for call in islice(client.calls, 5):
            assert (len(call.prompt), call.output_tokens) == (length, length)


def test_no_two_prompts_share_a_prefix() -> None:
    """The suite leaves nothing to be hit in a cache."""
    calls: list[Call] = [call for c in VTC_SUITES["vtc-overload"].clients(1) for call in islice(c.calls, 50)]
    assert len({call.prompt.tokens[:2] for call in calls}) == 100


def test_weights_speed_and_phases() -> None:
    """Weights are assigned in turn, speed multiplies rates and keeps durations, and phases are random."""
    suite = Suite(
        (*steady(1.0), Sender((Stretch(1.0, 60.0, window=10.0), Stretch(2.0)))), weights=(1.0, 2.0), speed=3.0
    )
    assert [client.weight for client in suite.clients(1)] == [1.0, 2.0]
    made = by_minute(suite)
    assert made["c1"] == pytest.approx([180] * 15, abs=1)
    assert made["c2"] == pytest.approx([90] + [360] * 14, abs=3)
    rising = by_minute(Suite((Sender((Stretch(1.0, 60.0, to=3.0), Stretch(3.0))),), speed=2.0))
    assert rising["c1"] == pytest.approx([240] + [360] * 14, abs=1)
    firsts = [next(iter(client.calls)).at for seed in (1, 2) for client in suite.clients(seed)]
    assert len(set(firsts)) == 4
    assert max(firsts) < 1 / 3
    assert steady(1.0, input=8, output=9)[0].input == Lengths(8)


@pytest.mark.parametrize("parameters", [{"senders": ()}, {"speed": 0.0}, {"weights": (0.0,)}])
def test_a_suite_without_traffic_is_refused(parameters: dict[str, object]) -> None:
    """A suite needs a client, and positive rates and weights."""
    with pytest.raises(ValueError, match="workload"):
        Suite(**{"senders": steady(1.0), **parameters})  # type: ignore[arg-type]
