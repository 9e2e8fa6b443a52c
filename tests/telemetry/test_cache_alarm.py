"""The log says when what is believed of a cache proves wrong."""

import pytest

from router.core.cache.calibration import ANSWERS_KEPT, MIN_ANSWERS
from router.core.model.events import Ticked, WorkerLeft, WorkerReported
from router.core.model.request import WorkerId
from router.core.scheduler import Scheduler
from router.telemetry.cache_alarm import REPEAT_SECONDS, CacheAlarm
from tests.core.scenario import Scene

W1 = WorkerId("w1")


def alarmed() -> tuple[CacheAlarm, Scheduler]:
    scheduler = Scene("d2lpm").scheduler
    return CacheAlarm(scheduler.mirror), scheduler


def test_wrong_predictions_are_told_of_once_a_minute_and_when_they_are_right_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not at every poll, and only of the worker whose they are."""
    caplog.set_level("INFO")
    alarm, scheduler = alarmed()
    for _ in range(MIN_ANSWERS):
        scheduler.mirror.cache(W1).calibration.record(900, 0, 1000)
    for second in range(int(REPEAT_SECONDS) + 1):
        alarm.observe(float(second), WorkerReported(W1, 0, 0), [])
        alarm.observe(float(second), WorkerReported(WorkerId("w2"), 0, 0), [])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["worker w1"] * 2
    for _ in range(ANSWERS_KEPT):
        scheduler.mirror.cache(W1).calibration.record(900, 900, 1000)
    alarm.observe(99.0, Ticked(), [])
    assert len(caplog.records) == 2
    alarm.observe(99.0, WorkerReported(W1, 0, 0), [])
    alarm.observe(100.0, WorkerReported(W1, 0, 0), [])
    assert [record.getMessage() for record in caplog.records[2:]] == [
        "worker w1: predictions of its cache are right again"
    ]


def test_nothing_is_believed_of_a_worker_that_left() -> None:
    """It may still answer a poll, and what was said of it is not remembered."""
    alarm, scheduler = alarmed()
    alarm.observe(0.0, WorkerReported(WorkerId("gone"), 0, 0), [])
    assert WorkerId("gone") not in scheduler.mirror.caches
    for _ in range(MIN_ANSWERS):
        scheduler.mirror.cache(W1).calibration.record(900, 0, 1000)
    alarm.observe(1.0, WorkerReported(W1, 0, 0), [])
    assert alarm._last_warning
    alarm.observe(2.0, WorkerLeft(W1), [])
    assert not alarm._last_warning
