"""KV events in a whole router whose emulated workers publish them."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from router.cli.replay import replay_file
from router.core.model.commands import Decision, Deficit, Dispatch
from router.core.model.events import Failed, Finished, Ticked, WorkerJoined, WorkerLeft
from router.core.model.load import Load
from router.core.model.request import ClientId, RequestId, Usage, WorkerId
from router.kv_events.stream import REPLAY_END, EventStream
from router.kv_events.subscriber import BlockFillObserver, WorkerFollower
from tests.support.publishing import WORKER
from tests.support.running import TIMEOUT_S, RunningRouter, chat, emulated_workers, running_router, until
from tests.support.workers_http import eventually

FIRST_COMPARED = 14
"""The question after which predictions are exact: before, a worker may have published nothing yet."""


async def ask(router: RunningRouter, content: str) -> tuple[int, int]:
    """Send a chat; return the tokens predicted and found in the cache."""
    async with router.post(chat(content, max_tokens=4)) as post:
        response = await post.response()
        usage = (await response.json())["usage"]["prompt_tokens_details"] or {}
        return int(response.headers["x-d2lpm-predicted-cached-tokens"]), usage["cached_tokens"]


async def all_is_taken(router: RunningRouter) -> bool:
    """Return whether the router has taken every message that the workers have published."""
    subscriber = router._inside("what follows the workers' events").side.kv_events._subscriber
    assert subscriber is not None
    streams = [stream for follower in subscriber._followers.values() for stream in follower._streams]
    return all([await has_all(stream) for stream in streams])


async def has_all(stream: EventStream) -> bool:
    """Return whether a publisher has no message to replay beyond those that were taken."""
    replay = stream._source.replay
    assert replay is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as past:
        past.connect(replay)
        await past.send_multipart([b"", stream._continuity.next_number.to_bytes(8, "big")])
        async with asyncio.timeout(TIMEOUT_S):
            *_, number, _ = await past.recv_multipart()
    return bool(number == REPLAY_END)


@pytest.mark.parametrize(("dialect", "size"), [("vllm", 16), ("sglang", 16), ("sglang", 1)])
async def test_predictions_are_exact(dialect: str, size: int) -> None:
    """With events and the engine's own token ids, the prediction is what the engine finds, whatever it has evicted."""
    flags = ("--kv-events=0", f"--dialect={dialect}", f"--block-size={size}", "--kv-tokens=1600")
    with emulated_workers(2, *flags) as urls:
        async with running_router(*urls, token_budget=TIMEOUT_S, min_match_tokens=1) as router:
            hits = 0
            for number in range(40):
                predicted, actual = await ask(router, f"{number % 7} tells " + "a long story " * (30 + number % 3))
                hits += actual
                if number > FIRST_COMPARED:
                    assert predicted == actual
                if number >= FIRST_COMPARED:
                    await eventually(partial(all_is_taken, router))
            router.scheduler.blocks.check_integrity()
            assert hits


async def test_a_worker_that_leaves_and_joins_is_followed_anew() -> None:
    """Nothing is known of a worker that left; when it joins again, its past events are replayed."""
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls, token_budget=TIMEOUT_S) as router:
            await ask(router, "a long story " * 60)
            blocks = router.scheduler.blocks
            await until(lambda: bool(blocks.blocks))
            held = blocks.blocks
            (worker,) = [state.worker for state in router.scheduler.fleet]
            router.directory.mark_unreachable(worker.id)
            router.scheduler_host.feed(WorkerLeft(worker.id))
            assert not blocks.blocks
            router.scheduler_host.feed(WorkerJoined(worker))
            await until(lambda: blocks.blocks >= held)  # the last block of the answer may have been stored later


async def test_a_journal_with_events_replays(tmp_path: Path) -> None:
    """Block changes are in the journal, so a replay makes the same decisions."""
    journal = tmp_path / "journal"
    with emulated_workers(2, "--kv-events=0", "--kv-tokens=1600") as urls:
        async with running_router(*urls, token_budget=TIMEOUT_S, journal=journal) as router:
            for number in range(12):
                await ask(router, f"{number % 5} tells " + "a long story " * 30)
            await until(lambda: bool(router.scheduler.blocks.blocks))
    text = journal.read_bytes()
    assert b"BlocksFollowed" in text
    assert b"BlocksChanged" in text
    assert replay_file(journal).difference is None


async def test_the_state_is_in_the_metrics() -> None:
    """The metrics show which workers are followed, and the outcomes of token lookups."""
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls, token_budget=TIMEOUT_S) as router:
            await ask(router, "a long story " * 60)
            await until(lambda: bool(router.scheduler.blocks.blocks))
            await ask(router, "a long story " * 60)
            async with router.http.get("/metrics") as response:
                text = await response.text()
            (worker,) = [state.worker.id for state in router.scheduler.fleet]
            assert f'd2lpm_kv_events_complete{{worker="{worker}"}} 1.0' in text
            assert 'd2lpm_token_lookups_total{outcome="known"} 1.0' in text


async def test_requests_are_observed_once_a_worker_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a worker publishes, the end of a long prompt makes the follower expect events."""
    expected: list[WorkerId] = []

    def note(follower: WorkerFollower, within: float) -> None:
        assert within > 0
        expected.append(follower.endpoint.id)

    monkeypatch.setattr(WorkerFollower, "await_news", note)
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls) as router:
            await ask(router, "a long story ")
            await until(lambda: bool(router.scheduler.blocks.blocks))
            assert not expected
            await ask(router, "a long story " * 1000)
            await until(lambda: bool(expected))
            assert expected == [state.worker.id for state in router.scheduler.fleet]


def test_a_worker_fills_blocks_by_what_it_computes() -> None:
    """A long uncached prompt fills blocks while it runs; a cached, short or failed one may fill none."""
    filled: list[tuple[WorkerId, float]] = []
    observer = BlockFillObserver(lambda worker, within: filled.append((worker, within)))
    endings: list[Finished | Failed] = [
        Finished(RequestId("computed"), Usage(1024, 1)),
        Finished(RequestId("cached"), Usage(1024, 1, 1)),
        Finished(RequestId("unknown")),
        Failed(RequestId("failed"), accepted=True, usage=Usage(1024, 1)),
        Finished(RequestId("elsewhere"), Usage(1024, 1)),
    ]
    for ending in endings[:-1]:
        decision = Decision(ClientId("ann"), {}, Deficit(), Load(), None, ())
        observer.observe(3.0, Ticked(), [Dispatch(ending.request, WORKER, 0, "room", decision)])
    for ending in endings:
        observer.observe(5.0, ending, [])
    assert filled == [(WORKER, 2.0)]
