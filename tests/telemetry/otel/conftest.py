"""A collector to which the routers of these tests send what they trace."""

from collections.abc import AsyncIterator

import pytest

from tests.support.otlp_receiver import Collector, otlp_receiver


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    async with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
        yield receiver
