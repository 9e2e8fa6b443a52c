"""The metrics of the GenAI conventions, as a collector gets them when the router ends."""

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint

from bench.lab.picture.received_spans import values
from tests.support.otlp_receiver import Collector
from tests.support.running import chat, running_router
from tests.support.scripted_engine import DONE, chunk, scripted_engine, usage_chunk

pytestmark = pytest.mark.one_process("the collector's address is in the environment of this process")

CHAT_CALL = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m"}


def point(points: list[HistogramDataPoint], **attributes: str) -> HistogramDataPoint:
    """Return the one point with these attributes beside those of a chat."""
    wanted: Mapping[str, Any] = {**CHAT_CALL, **{name.replace("__", "."): value for name, value in attributes.items()}}
    (found,) = [each for each in points if values(each.attributes) == wanted]
    return found


async def test_calls_are_measured_by_the_conventions(collector: Collector) -> None:
    """Tokens by type, and times in the buckets that the conventions name; a failed call has no times of tokens."""
    async with scripted_engine() as engine, running_router(engine.url, tries=1, otel=True) as router:
        async with router.post(chat()) as post:
            (await engine.call()).reset()
            assert (await post.response()).status == 502
        async with router.post(chat(stream=True)) as post:
            call = await engine.call()
            await call.stream(chunk("one"), chunk(" two", "stop"), usage_chunk(10, 3, 8), DONE)
            await post.read()
    points = collector.points
    assert points.keys() == {
        "gen_ai.client.token.usage",
        *(f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")),
    }
    tokens = points["gen_ai.client.token.usage"]
    assert [point(tokens, gen_ai__token__type=kind).sum for kind in ("input", "output")] == [10, 3]
    assert [*tokens[0].explicit_bounds][:4] == [1, 4, 16, 64]
    whole = points["gen_ai.server.request.duration"]
    answered, broken = point(whole), point(whole, error__type="worker_unreachable")
    assert (answered.count, broken.count) == (1, 1)
    assert [*whole[0].explicit_bounds][-1] == 81.92
    first, rest = (
        point(points["gen_ai.server.time_to_first_token"]),
        point(points["gen_ai.server.time_per_output_token"]),
    )
    assert (first.count, rest.count) == (1, 1)
    assert first.sum + 2 * rest.sum <= answered.sum
