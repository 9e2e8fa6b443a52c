"""The log warns when predictions of a cache are wrong."""

import pytest

from router.core.cache.cache_model import ANSWERS_KEPT, MIN_ANSWERS
from router.core.model.events import Ticked, WorkerLeft, WorkerReported
from router.core.model.request import WorkerId
from router.core.scheduler import Scheduler
from router.telemetry.cache_alarm import REPEAT_SECONDS, CacheAlarm
from tests.core.scenario import Scene

W1 = WorkerId("w1")


def alarm_and_scheduler() -> tuple[CacheAlarm, Scheduler]:
    scheduler = Scene("d2lpm").scheduler
    return CacheAlarm(scheduler.mirror), scheduler


def test_wrong_predictions_are_logged_once_a_minute_and_when_they_are_right_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning is not repeated at every poll, and names only the worker concerned."""
    caplog.set_level("INFO")
    alarm, scheduler = alarm_and_scheduler()
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


@pytest.mark.parametrize(
    ("predicted", "actual", "said"),
    [
        (900, 450, "off by 45 % of the prompt; less is cached there than predicted, so each counts 50 % until"),
        (450, 900, "off by 45 % of the prompt; more is cached there than predicted"),
    ],
)
def test_the_warning_says_what_follows(
    predicted: int, actual: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Predictions that promise too much are discounted; those that promise too little keep their weight."""
    alarm, scheduler = alarm_and_scheduler()
    for _ in range(MIN_ANSWERS):
        scheduler.mirror.cache(W1).calibration.record(predicted, actual, 1000)
    alarm.observe(0.0, WorkerReported(W1, 0, 0), [])
    assert said in caplog.text


def test_the_alarm_forgets_a_worker_that_left() -> None:
    """The worker may still answer a poll, and its last warning is forgotten."""
    alarm, scheduler = alarm_and_scheduler()
    alarm.observe(0.0, WorkerReported(WorkerId("gone"), 0, 0), [])
    assert WorkerId("gone") not in scheduler.mirror.caches
    for _ in range(MIN_ANSWERS):
        scheduler.mirror.cache(W1).calibration.record(900, 0, 1000)
    alarm.observe(1.0, WorkerReported(W1, 0, 0), [])
    assert alarm._last_warning
    alarm.observe(2.0, WorkerLeft(W1), [])
    assert not alarm._last_warning
