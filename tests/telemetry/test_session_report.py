"""What `/sessions`, `/explain` and the metrics say of agent sessions."""

from prometheus_client import CollectorRegistry, generate_latest

from router.core.model.request import RequestId
from router.core.policies.sessions.places import Loss
from router.telemetry.session_report import GateMetrics, SessionState, gate_report, session_entry
from tests.core.policies.sessions.scenes import GatedScene


def crowded() -> tuple[GatedScene, list[RequestId]]:
    """Return a fleet with one session that has a place and two that wait, and their calls."""
    scene = GatedScene(kv_chunks=10)
    calls = [scene.call("ada", "aaaaaa", "one"), scene.call("bob", "bbbbbb", "two")]
    scene.wait(3.0)
    return scene, [*calls, scene.call("bob", "cccccc", "three")]


def test_a_report_says_who_waits_behind_whom() -> None:
    """Paused sessions come first, in order, with the time since their pause and the client just before them."""
    scene, _ = crowded()
    scene.wait(4.0)
    report = gate_report(scene.gate, scene.now)
    assert [(each.session, each.state, each.ahead, each.behind) for each in report.sessions] == [
        ("two", SessionState.PAUSED, 0, None),
        ("three", SessionState.PAUSED, 1, "bob"),
        ("one", SessionState.ACTIVE, None, None),
    ]
    assert [each.paused_s for each in report.sessions] == [7.0, 4.0, None]
    assert report.sessions[2].worker == "w1"
    assert report.reserved_tokens == {"w1": 6 * 32}
    assert report.open == {"llama": False}


def test_a_report_is_bounded() -> None:
    """A report shows no more sessions than it may, and counts all of them."""
    scene, _ = crowded()
    report = gate_report(scene.gate, scene.now, shown=1)
    assert [each.session for each in report.sessions] == ["two"]
    assert report.states[SessionState.PAUSED] == 2
    assert report.states[SessionState.ACTIVE] == 1


def test_an_explanation_shows_the_session_of_a_live_call() -> None:
    """The session of a call can be found by the call while it is live; a call without one has none."""
    scene, (running, _, last) = crowded()
    entry, waiting = session_entry(scene.gate, running, scene.now), session_entry(scene.gate, last, scene.now)
    assert entry is not None
    assert (entry.session, entry.state) == ("one", SessionState.ACTIVE)
    assert waiting is not None
    assert (waiting.ahead, waiting.behind) == (1, "bob")
    scene.cancel(running)
    assert session_entry(scene.gate, running, scene.now) is None
    assert session_entry(None, last, scene.now) is None


def test_the_metrics_count_pauses_and_lost_places() -> None:
    """Pauses, places lost and reserved tokens are counted, and no label names a session."""
    scene, (running, *_) = crowded()
    scene.answer(running, "aaaaaaa", ended_turn=True)
    scene.wait(6.0)
    report = gate_report(scene.gate, scene.now)
    assert report.places_lost[Loss.IDLE] == 1
    assert (report.pauses, report.pause_s) == (1, 9.0)
    registry = CollectorRegistry()
    registry.register(GateMetrics(lambda: gate_report(scene.gate, scene.now, shown=0)))
    text = generate_latest(registry).decode()
    assert 'd2lpm_session_places_lost_total{reason="idle"} 1.0' in text
    assert 'd2lpm_session_gate_open{model="llama"} 0.0' in text
    assert "two" not in text


def test_contexts_to_be_computed_again_are_counted() -> None:
    """A session that gets a place again, and whose worker has lost its context, counts with that context."""
    scene = GatedScene(kv_chunks=10)
    scene.answer(scene.call("ada", "aaaaaa", "one"), "aaaaaaa")
    scene.evict("w1")
    scene.call("ada", "aaaaaaab", "one")
    assert scene.gate.recomputed_tokens == 6 * 32
