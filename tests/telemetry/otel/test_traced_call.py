"""A traced call is a tree of spans that a collector gets over OTLP: the call, its waits, placements and attempts."""

import json
import logging
from collections.abc import Mapping, Sequence

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bench.lab.picture.received_spans import ReceivedSpan
from tests.front.test_both_legs import both, legs, prefilled
from tests.front.test_handoffs import keep, tiers
from tests.front.test_retries import ERROR
from tests.support.otlp_receiver import Collector
from tests.support.running import CHAT, chat, running_router, until
from tests.support.scripted_engine import DONE, called_first, chunk, scripted_engine, usage_chunk
from tests.upstream.test_continued_streams import final, pair, piece, read_until, role, said

pytestmark = pytest.mark.one_process("the collector's address is in the environment of this process")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def outline(trace: Sequence[ReceivedSpan]) -> list[tuple[str, str | None]]:
    """Return name and outcome of the spans in the call, in the order of their start."""
    return [(each.name, each.own.get("outcome")) for each in trace[1:]]


def check_times(trace: Sequence[ReceivedSpan]) -> None:
    """Raise AssertionError unless all spans are children of the call, and lie in it."""
    call, *inner = trace
    for each in inner:
        assert each.span.parent_span_id == call.span.span_id
        assert call.times[0] <= each.times[0] <= each.times[1] <= call.times[1], each.name


def context_of(headers: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return the trace, the parent and whether the trace is sampled, as a worker gets it."""
    version, trace, parent, flags = headers["traceparent"].split("-")
    assert version == "00"
    return trace, parent, bool(int(flags, 16) & 1)


async def test_a_call_is_a_wait_a_placement_and_an_attempt(collector: Collector) -> None:
    """The call says who made it and how it ended, the placement why, and the attempt what its engine counted."""
    async with scripted_engine() as engine, running_router(engine.url, otel=True) as router:
        worker = engine.url.removeprefix("http://")
        async with router.post(chat("my prompt", stream=True), authorization="Bearer sk-key") as post:
            call = await engine.call()
            await call.stream(chunk("my answer"), chunk("", "stop"), usage_chunk(10, 3, 8), DONE)
            await post.read()
        trace = await collector.trace()
    check_times(trace)
    assert [each.name for each in trace] == ["POST /v1/chat/completions", "queue", "placement", "chat m"]
    served, _, placement, attempt = trace
    assert not any(each.failed for each in trace)
    assert served.attributes["http.response.status_code"] == 200
    assert served.attributes["http.route"] == CHAT
    assert served.resource["service.name"] == "d2lpm-router"
    times = {name: served.own[name] for name in ("queue_seconds", "time_to_first_token_seconds")}
    known = {"client": served.own["client"], "worker": worker, "tries": 1, "outcome": "finished"}
    assert served.own == {**times, **known, "request": served.own["request"]}
    assert placement.own == {
        **{"worker": worker, "leg": "whole", "policy": "dlpm_home", "why": placement.own["why"]},
        **{"match_tokens": 0, "longest_match_tokens": 0, "in_flight": 0, "passed_over": 0},
        **{name: placement.own[name] for name in ("deficit.placement", "deficit.order")},
    }
    assert placement.own["why"]
    assert attempt.span.kind == Span.SPAN_KIND_CLIENT
    assert attempt.own == {
        **{"worker": worker, "leg": "whole", "attempt": 1, "predicted_cached_tokens": 0, "outcome": "finished"},
    }
    said = {name: value for name, value in attempt.attributes.items() if not name.startswith("d2lpm.")}
    assert 0 <= said.pop("gen_ai.response.time_to_first_chunk") <= times["time_to_first_token_seconds"]
    assert said == {
        **{"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m"},
        **{"server.address": "127.0.0.1", "server.port": engine.port},
        **{"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 3},
        "gen_ai.usage.cache_read.input_tokens": 8,
    }
    for body in collector.bodies:
        assert not any(secret in body for secret in (b"my prompt", b"my answer", b"sk-key"))


async def test_a_retried_stream_is_one_call_with_two_attempts(collector: Collector) -> None:
    """The first attempt has the error, the second the usage, and the call has neither: its client got an answer."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", otel=True) as router,
    ):
        async with router.post(chat(stream=True)) as post:
            call, _, other = await called_first(one, two)
            call.reset()
            await (await other.call()).answer()
            await post.read()
        trace = await collector.trace()
    check_times(trace)
    assert outline(trace) == [
        *[("queue", None), ("placement", None), ("chat m", "failed")],
        *[("queue", None), ("placement", None), ("chat m", "finished")],
    ]
    first, second = (each for each in trace if each.name == "chat m")
    assert (first.failed, first.attributes["error.type"]) == (True, "broken")
    assert first.times[1] <= second.times[0]
    assert second.attributes["gen_ai.usage.output_tokens"] == 1
    assert not second.failed
    assert not trace[0].failed
    assert trace[0].own["tries"] == 2


async def test_the_rest_of_a_broken_stream_is_a_second_attempt(collector: Collector) -> None:
    """A stream that another worker continues is one call, too, whose tokens its attempts count once."""
    async with pair(otel=True) as ((one, two), router):
        async with router.post(chat(stream=True, max_tokens=6), **{"x-request-id": "broken"}) as post:
            first = await one.call()
            await first.begin()
            for block in (role(range(100, 110)), said("a", [1], 1), said("b", [2], 2)):
                await first.write(block)
            await read_until(post, b'"b"')
            first.reset()
            await (await two.call()).stream(piece("c", [3], 1, "stop"), final(12, 1), DONE)
            await post.read()
        trace = await collector.trace("broken")
    check_times(trace)
    attempts = [each for each in trace if each.name == "chat m"]
    assert [each.own["outcome"] for each in attempts] == ["failed", "finished"]
    assert [each.attributes.get("gen_ai.usage.input_tokens") for each in attempts] == [None, 10]
    assert [each.attributes.get("gen_ai.usage.output_tokens") for each in attempts] == [None, 3]


async def test_a_worker_gets_its_attempt_as_parent(collector: Collector) -> None:
    """Each attempt is in the client's trace, and what the client said of it comes along as it was."""
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=2", "baggage": "a=b"}
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", otel=True) as router,
    ):
        async with router.post(chat(), **sent) as post:
            first, _, other = await called_first(one, two)
            first.reset()
            second = await other.call()
            await second.answer()
            await post.read()
        trace = await collector.trace()
    assert trace[0].span.trace_id.hex() == TRACE
    assert trace[0].span.parent_span_id.hex() == PARENT
    attempts = [each.span.span_id.hex() for each in trace if each.name == "chat m"]
    assert [context_of(call.headers) for call in (first, second)] == [(TRACE, attempt, True) for attempt in attempts]
    for call in (first, second):
        assert (call.headers["tracestate"], call.headers["baggage"]) == ("vendor=1,other=2", "a=b")


@pytest.mark.parametrize(
    "sent",
    [
        {"traceparent": "mine"},
        {"traceparent": "0" * 600},
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "mine"},
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "mine" * 200},
    ],
    ids=["parent", "long parent", "state", "long state"],
)
async def test_an_invalid_context_is_not_logged(
    sent: Mapping[str, str], collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes to no worker, and no caller can fill the log with it. Without a valid parent a new trace begins."""
    async with scripted_engine() as engine, running_router(engine.url, otel=True) as router:
        async with router.post(chat(), **sent) as post:
            call = await engine.call()
            await call.answer()
            await post.read()
        await collector.trace()
    assert "tracestate" not in call.headers
    assert (context_of(call.headers)[0] == TRACE) is (TRACE in sent["traceparent"])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_call_that_its_client_does_not_sample_is_not_sent(collector: Collector) -> None:
    """The worker still learns the trace, and that it is not sampled. The next call begins a trace of its own."""
    async with scripted_engine() as engine, running_router(engine.url, otel=True) as router:
        for headers in ({"traceparent": f"00-{TRACE}-{PARENT}-00"}, {}):
            async with router.post(chat(), **headers) as post:
                call = await engine.call()
                await call.answer()
                await post.read()
            trace, parent, sampled = context_of(call.headers)
            assert (trace == TRACE, sampled) == ((True, False) if headers else (False, True))
            assert parent != PARENT
        (served, *_) = await collector.trace()
    assert served.span.trace_id.hex() == trace


async def test_without_tracing_the_context_passes_as_it_came() -> None:
    """The router adds none of its own."""
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": "vendor=1"}
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for headers in (sent, {}):
            async with router.post(chat(), **headers) as post:
                call = await engine.call()
                await call.answer()
                await post.read()
            assert {name: call.headers[name] for name in sent if name in call.headers} == headers


@pytest.mark.parametrize(
    ("body", "settings", "error", "failed"),
    [
        ({"model": "other", "messages": []}, {}, "model_not_found", False),
        (chat(), {"max_queued": 0, "window": "fixed", "max_inflight": 1}, "rejected-saturated", False),
        (chat(), {"max_queued": 1, "window": "fixed", "max_inflight": 1}, None, False),
    ],
    ids=["unknown model", "full queue", "left"],
)
async def test_a_call_without_attempt_says_why(
    body: Mapping[str, object],
    settings: Mapping[str, object],
    error: str | None,
    failed: bool,
    collector: Collector,
) -> None:
    """A refused call has the reason, a client's error is none of the router's, and one whose client left has none."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, otel=True, **settings) as router,
        router.post(chat(), traceparent=f"00-{TRACE}-{PARENT}-00") as other,
    ):
        running = await engine.call()
        async with router.post(body) as post:
            if error is None:
                await router.until_waiting(1)
            else:
                assert (await post.response()).status >= 400
        served, *rest = await collector.trace()
        await running.answer()
        await other.read()
    assert served.attributes.get("error.type") == error
    assert served.own["outcome"] == ("cancelled" if error is None else "refused")
    assert served.failed is failed
    assert {each.name for each in rest} <= {"queue"}


async def test_a_call_that_no_worker_answers_has_failed(collector: Collector) -> None:
    """The client's error is that of the call, and the worker's that of the attempt."""
    async with scripted_engine() as engine, running_router(engine.url, tries=1, otel=True) as router:
        async with router.post(chat()) as post:
            (await engine.call()).reset()
            assert (await post.response()).status == 502
        trace = await collector.trace()
    assert trace[0].failed
    assert trace[0].attributes["error.type"] == "worker_unreachable"
    assert outline(trace) == [("queue", None), ("placement", None), ("chat m", "failed"), ("queue", None)]


async def test_an_error_inside_a_stream_is_an_error_of_the_call(collector: Collector) -> None:
    """Its status is 200, so the fault says why it failed."""
    async with scripted_engine() as engine, running_router(engine.url, tries=1, otel=True) as router:
        async with router.post(chat(stream=True)) as post:
            await (await engine.call()).stream(ERROR, DONE)
            assert (await post.response()).status == 200
            await post.read()
        (served, *_) = await collector.trace()
    assert served.failed
    assert (served.attributes["error.type"], served.own["outcome"]) == ("error", "failed")


async def test_prefill_and_decode_are_attempts_of_one_call(collector: Collector) -> None:
    """Each has its worker, its leg and its usage, and each worker its own parent."""
    async with tiers(otel=True) as ((prefill,), (decode,), router):
        async with router.post(chat(stream=True)) as post:
            await keep(first := await prefill.call())
            await (second := await decode.call()).answer()
            await post.read()
        trace = await collector.trace()
    check_times(trace)
    attempts = [each for each in trace if each.name == "chat m"]
    assert [(each.own["leg"], each.own["outcome"]) for each in attempts] == [
        ("prefill", "prefilled"),
        ("decode", "finished"),
    ]
    assert [each.attributes["gen_ai.usage.input_tokens"] for each in attempts] == [10, 10]
    parents = [context_of(call.headers)[1] for call in (first, second)]
    assert parents == [each.span.span_id.hex() for each in attempts]


@pytest.mark.parametrize("fails", [False, True])
async def test_two_calls_at_once_are_two_attempts_at_once(fails: bool, collector: Collector) -> None:
    """If the prefill fails, it has the error, and the decode worker's attempt is aborted."""
    async with legs(otel=True) as fleet:
        async with fleet.router.post(chat(stream=True)) as post:
            calls = await both(fleet)
            if fails:
                await calls.prefill.respond(400, b'{"error":{"message":"no","code":400}}')
            else:
                await prefilled(calls.prefill)
                await until(lambda: not fleet.router.scheduler.prefills)
                await calls.decode.answer()
            await post.read()
        trace = await collector.trace()
    check_times(trace)
    attempts = {each.own["leg"]: each for each in trace if each.name == "chat m"}
    ends = ("failed", "aborted") if fails else ("prefilled", "finished")
    assert tuple(attempts[leg].own["outcome"] for leg in ("prefill", "decode")) == ends
    assert [attempts[leg].failed for leg in ("prefill", "decode")] == [fails, False]
    parents = [context_of(call.headers)[1] for call in (calls.prefill, calls.decode)]
    assert parents == [attempts[leg].span.span_id.hex() for leg in ("prefill", "decode")]


async def test_other_paths_are_not_traced(collector: Collector) -> None:
    """Neither a probe of the health nor a scrape of the metrics makes a span."""
    async with scripted_engine() as engine, running_router(engine.url, otel=True) as router:
        for path in ("/health", "/v1/models", "/metrics"):
            async with router.http.get(path) as response:
                await response.read()
        async with router.post(json.dumps(chat()).encode()) as post:
            await (await engine.call()).answer()
            await post.read()
        await collector.trace()
    assert {each.span.trace_id for each in collector.spans} == {collector.spans[0].span.trace_id}
