"""The access log says of each call who made it, where it went, what it took and how it ended."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from router.telemetry.logs.log_format import FIELDS
from router.telemetry.logs.repeats import ACCESS_LOGGER
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import DONE, called_first, chunk, scripted_engine, usage_chunk

pytestmark = pytest.mark.one_process("the test reads the router's log")


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS_LOGGER)


def calls(caplog: pytest.LogCaptureFixture) -> list[Mapping[str, Any]]:
    """Return the fields of each logged call, with its level."""
    records = [record for record in caplog.records if record.name == ACCESS_LOGGER]
    return [{**getattr(record, FIELDS), "level": record.levelname} for record in records]


async def one_call(caplog: pytest.LogCaptureFixture) -> Mapping[str, Any]:
    """Wait until one call is logged."""
    await until(lambda: bool(calls(caplog)))
    (call,) = calls(caplog)
    return call


async def test_a_streamed_call_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A call that is answered has its client, model, worker, the engine's tokens, and its times in order."""
    async with scripted_engine() as engine, running_router(engine.url, access_log=True) as router:
        async with router.post(chat(stream=True, user="ann"), x_request_id="mine") as post:
            call = await engine.call()
            await call.stream(chunk("yes"), chunk("", "stop"), usage_chunk(10, 1, 8), DONE)
            await post.read()
        logged = dict(await one_call(caplog))
    times = [logged.pop(name) for name in ("queue_ms", "ttft_ms", "duration_ms")]
    assert 0 <= times[0] <= times[1] <= times[2]
    assert logged == {
        **{"level": "INFO", "outcome": "finished", "status": 200, "request": "mine", "address": "127.0.0.1"},
        **{"method": "POST", "path": "/v1/chat/completions", "client": "user-ann", "model": "m", "tries": 1},
        **{"worker": engine.url.removeprefix("http://")},
        **{"prompt_tokens": 10, "cached_tokens": 8, "output_tokens": 1},
    }


async def test_a_retried_call_counts_its_tries(caplog: pytest.LogCaptureFixture) -> None:
    """A call that a worker broke off is one line, with the worker that answered it."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", access_log=True) as router,
    ):
        async with router.post(chat()) as post:
            call, _, other = await called_first(one, two)
            call.reset()
            await (await other.call()).answer()
            await post.read()
        logged = await one_call(caplog)
    assert (logged["tries"], logged["worker"], logged["outcome"]) == (2, other.url.removeprefix("http://"), "finished")


async def test_a_failed_call_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A call that no worker answered has the error that its client got."""
    async with scripted_engine() as engine, running_router(engine.url, tries=1, access_log=True) as router:
        async with router.post(chat()) as post:
            (await engine.call()).reset()
            assert (await post.response()).status == 502
        logged = await one_call(caplog)
    assert (logged["level"], logged["outcome"], logged["error"]) == ("WARNING", "failed", "worker_unreachable")


async def test_an_error_of_the_engine_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A call whose answer is the engine's own error is not taken for one that the router refused."""
    async with scripted_engine() as engine, running_router(engine.url, access_log=True) as router:
        async with router.post(chat()) as post:
            await (await engine.call()).respond(400, b'{"error": {"message": "no"}}')
            assert (await post.response()).status == 400
        logged = await one_call(caplog)
    assert (logged["outcome"], logged["status"], logged["tries"]) == ("failed", 400, 1)


async def test_a_client_that_leaves_has_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """A call whose client disconnects is no failure, and needs no status."""
    async with scripted_engine() as engine, running_router(engine.url, access_log=True) as router:
        async with router.post(chat()):
            await engine.call()
        logged = await one_call(caplog)
    assert (logged["level"], logged["outcome"]) == ("INFO", "cancelled")
    assert "status" not in logged
    assert logged["request"]


@pytest.mark.parametrize(
    ("body", "settings", "error"),
    [
        ({"model": "other", "messages": []}, {}, "model_not_found"),
        (chat(), {"max_queued": 0, "window": "fixed", "max_inflight": 1}, "rejected-saturated"),
    ],
    ids=["unknown model", "full queue"],
)
async def test_a_refused_call_says_why(
    body: Mapping[str, object], settings: Mapping[str, object], error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that no worker was sent has the reason, and no worker and no tries."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, access_log=True, **settings) as router,
        router.post(chat()) as other,
    ):
        running = await engine.call()
        async with router.post(body) as post:
            assert (await post.response()).status >= 400
        logged = await one_call(caplog)
        await running.answer()
        await other.read()
    assert (logged["level"], logged["outcome"], logged["error"]) == ("WARNING", "refused", error)
    assert not {"worker", "tries", "ttft_ms"} & logged.keys()
