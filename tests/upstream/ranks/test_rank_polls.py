"""What polls of one URL with several ranks report: one page for all, and an event for each."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
import pytest

from router.core.model.events import Event, WorkerAnswered, WorkerJoined, WorkerLeft, WorkerReported, WorkReport
from router.core.model.request import Takes, WorkerId
from router.upstream.dialects import LOADS_PATH, SGLANG, VLLM, pages_by_rank, reported_ranks
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.polling.poll_client import PollClient
from router.upstream.polling.probe import WorkerProbe
from router.upstream.ranks.barrier_health import BarrierHealth
from router.upstream.ranks.rank_rules import RankRules
from tests.support.scripted_engine import ScriptedEngine, scripted_engine


def page(*ranks: int) -> bytes:
    """Return vLLM's metrics of these ranks; rank r has r + 1 requests running and 10 (r + 1) tokens generated."""
    lines = []
    for name in ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "e2e_seconds_bucket"):
        lines.append(f"# TYPE vllm:{name} gauge")
        for rank in ranks:
            value = {"num_requests_running": rank + 1, "generation_tokens_total": 10 * (rank + 1)}.get(name, 0)
            lines.append(f'vllm:{name}{{model_name="m",engine="{rank}"}} {value}.0')
    for rank in ranks:
        sizes = f'num_gpu_blocks="{11 + rank}",block_size="16"'
        lines.append(f'vllm:cache_config_info{{engine="{rank}",{sizes}}} 1.0')
    return "\n".join(lines).encode() + b"\n"


@dataclass
class Watch:
    """A probe of one engine, polled step by step."""

    engine: ScriptedEngine
    directory: WorkerDirectory
    probe: WorkerProbe
    client: PollClient
    events: list[Event]

    async def fed(self, *ranks: int) -> list[Event]:
        """Poll once, while the engine has these ranks, and return the events fed."""
        self.engine.poll_answers["/metrics"] = (200, page(*ranks))
        await self.probe.poll(self.client)
        events = self.events.copy()
        self.events.clear()
        return events


@asynccontextmanager
async def watched(rules: RankRules = RankRules()) -> AsyncIterator[Watch]:  # noqa: B008 - frozen
    async with scripted_engine("m") as engine, PollClient() as client:
        endpoint = WorkerEndpoint(WorkerId("w"), engine.url)
        directory = WorkerDirectory([endpoint])
        events: list[Event] = []
        feed = BarrierHealth(directory, events.append).feed
        yield Watch(engine, directory, WorkerProbe(endpoint, feed, directory, rules), client, events)


def named(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Return kind and worker of each event."""
    return [
        (type(each).__name__, each.worker.id if isinstance(each, WorkerJoined) else each.worker)
        for each in events
        if isinstance(each, WorkerJoined | WorkerLeft | WorkerReported | WorkerAnswered)
    ]


async def test_each_rank_joins_and_reports_its_own_load() -> None:
    """One page tells running requests, work and capacity of every rank; the URL as a whole only answers."""
    async with watched() as watch:
        events = await watch.fed(0, 2)
        joins = [event.worker for event in events if isinstance(event, WorkerJoined)]
        assert [(each.id, each.rank, each.barrier, each.takes) for each in joins] == [
            ("w@0", 0, "w", Takes.PINNED),
            ("w@2", 2, "w", Takes.PINNED),
            ("w", None, None, Takes.UNPINNED),
        ]
        reports = [event for event in events if isinstance(event, WorkerReported)]
        assert [(each.worker, each.running, each.kv_tokens) for each in reports] == [("w@0", 1, 160), ("w@2", 3, 192)]
        assert [each.work for each in reports] == [WorkReport(None, 10.0), WorkReport(None, 30.0)]
        assert named(events)[-1] == ("WorkerAnswered", "w")
        assert [call.path for call in watch.engine.polls].count("/metrics") == 2  # for the ranks, and for their loads


async def test_a_rank_that_leaves_is_named_and_one_that_comes_joins(caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on with those that it has; a single one is a worker without ranks again."""
    async with watched() as watch:
        await watch.fed(0, 1)
        with caplog.at_level(logging.WARNING):
            events = await watch.fed(0, 1, 2)
        assert ("WorkerJoined", "w@2") in named(events)
        assert not any(isinstance(event, WorkerLeft) for event in events)
        assert not caplog.text
        with caplog.at_level(logging.WARNING):
            events = await watch.fed(0, 2)
        assert [name for kind, name in named(events) if kind == "WorkerLeft"] == ["w@1"]
        assert "worker w@1 is gone" in caplog.text
        assert [each.id for each in watch.directory.endpoints if each.healthy] == ["w", "w@0", "w@2"]
        events = await watch.fed(0)
        assert {name for kind, name in named(events) if kind == "WorkerLeft"} == {"w@0", "w@2"}
        assert named(events)[0] == ("WorkerJoined", "w"), "so that it can take what waits for the ranks"
        assert [event.worker.takes for event in events if isinstance(event, WorkerJoined)] == [Takes.ALL]


async def test_the_settings_decide_what_becomes_of_reported_ranks() -> None:
    """Switched off, the URL is one worker with all loads; without a barrier the ranks wait for no other."""
    async with watched(RankRules("off")) as watch:
        events = await watch.fed(0, 1)
        assert named(events) == [("WorkerJoined", "w"), ("WorkerReported", "w")]
        assert [event.running for event in events if isinstance(event, WorkerReported)] == [3]
    async with watched(RankRules(barrier="off")) as watch:
        events = await watch.fed(0, 1)
        assert {event.worker.barrier for event in events if isinstance(event, WorkerJoined)} == {None}


async def test_ranks_leave_and_return_with_their_url() -> None:
    """A URL that refuses connections takes all ranks along, once; they return with its next answer."""
    async with watched() as watch:
        await watch.fed(0, 1)
        assert watch.directory.mark_unreachable(WorkerId("w@1")) == ["w@0", "w@1", "w"]
        assert not any(each.healthy for each in watch.directory.endpoints)
        assert [name for kind, name in named(await watch.fed(0, 1)) if kind == "WorkerJoined"] == ["w@0", "w@1", "w"]
        assert all(each.healthy for each in watch.directory.endpoints)


async def test_ranks_stay_known_while_the_engine_does_not_say() -> None:
    """A URL that returns without its metrics has the ranks that it had before."""
    async with watched() as watch:
        await watch.fed(0, 1)
        watch.directory.mark_unreachable(WorkerId("w"))
        watch.engine.poll_answers["/metrics"] = (500, b"")
        await watch.probe.poll(watch.client)
        assert [name for kind, name in named(watch.events) if kind == "WorkerJoined"] == ["w@0", "w@1", "w"]


async def test_a_field_that_is_refused_at_one_rank_is_known_of_all() -> None:
    """Ranks of one URL are one engine."""
    async with watched() as watch:
        await watch.fed(0, 1)
        watch.directory.refuse_fields(WorkerId("w@0"), "/v1/chat/completions", ["return_token_ids"])
        assert all(each.fields.refused for each in watch.directory.endpoints)


def test_pages_are_split_by_the_label_with_the_rank() -> None:
    """Only what is read remains; a page without the label has no rank, and a rank that is no number is none."""
    pages = pages_by_rank("/metrics", page(0, 7), VLLM.rank_label)
    assert pages.keys() == {0, 7}
    assert b"bucket" not in pages[7]
    assert b'engine="0"' not in pages[7]
    assert reported_ranks(page(0, 7), VLLM.rank_label) == frozenset({0, 7})
    assert reported_ranks(b'vllm:num_requests_running{engine="x"} 1\n', VLLM.rank_label) is None
    assert reported_ranks(b"vllm:num_requests_running 1\n", VLLM.rank_label) is None
    assert not pages_by_rank("/metrics", b"", VLLM.rank_label)


def test_loads_are_split_by_their_entries() -> None:
    """An entry without a rank, or that is no object, is left out."""
    loads = {"loads": [{"dp_rank": 1, "num_running_reqs": 4}, {"dp_rank": "2"}, 3]}
    pages = pages_by_rank(LOADS_PATH, orjson.dumps(loads), SGLANG.rank_label)
    assert {rank: orjson.loads(own) for rank, own in pages.items()} == {1: {"loads": [loads["loads"][0]]}}
