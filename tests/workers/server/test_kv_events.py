"""The KV events that an emulated worker publishes."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import aiohttp
import msgpack
import orjson
import pytest
import zmq
import zmq.asyncio

from tests.support.workers_http import CHAT, chat, worker
from workers.engine.block_log import ROOT_HASH, BlockEvent, Cleared, Removed, Stored, chained_hashes
from workers.engine.engine import create_engine, default_config
from workers.engine.hardware import HARDWARE
from workers.engine.model import Dialect, Request

PATIENCE = 60.0


class CacheFromEvents:
    """Reconstructs the contents of a cache from its events."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}

    def apply(self, events: Sequence[BlockEvent]) -> None:
        for event in events:
            match event:
                case Stored(hashes, parent, _):
                    assert parent is None or parent in self.copies
                    for hash_ in hashes:
                        self.copies[hash_] = self.copies.get(hash_, 0) + 1
                case Removed(hashes):
                    for hash_ in hashes:
                        self.copies[hash_] -= 1
                        if not self.copies[hash_]:
                            del self.copies[hash_]
                case Cleared():
                    self.copies.clear()

    def hit(self, prompt: Sequence[int], size: int) -> int:
        found = 0
        for hash_ in chained_hashes(ROOT_HASH, prompt[: (len(prompt) - 1) // size * size], size):
            if hash_ not in self.copies:
                break
            found += size
        return found


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("size", [1, 4])
def test_events_report_what_the_cache_holds(dialect: Dialect, size: int) -> None:
    """After any step, the hit of each waiting prompt equals the hit that follows from the events."""
    engine = create_engine(default_config(dialect, HARDWARE["instant"], kv_tokens=160, block_size=size))
    log, reconstructed = engine.log_blocks(), CacheFromEvents()
    hits = 0
    for number in range(60):
        prompt = [number % 3, *range(10 + number % 7), number % 5, number % 4, 7]
        reconstructed.apply(log.take())
        expected = reconstructed.hit(prompt, size)
        engine.submit(Request(str(number), prompt, 1 + number % 6, ignore_eos=True))
        cached = None
        while engine.has_work:
            for output in engine.step()[1]:
                cached = output.cached_tokens
        assert cached == expected
        hits += expected
    assert hits
    reconstructed.apply(log.take())
    assert len(reconstructed.copies) * size == engine.cached_tokens
    engine.flush_cache()
    reconstructed.apply(log.take())
    assert not reconstructed.copies


def test_a_used_cache_is_not_logged() -> None:
    """Logging of a cache that is not empty raises RuntimeError."""
    engine = create_engine(default_config("vllm", HARDWARE["instant"]))
    engine.submit(Request("r", [1], 1))
    with pytest.raises(RuntimeError):
        engine.log_blocks()


async def get_json(url: str, path: str) -> Any:
    async with aiohttp.ClientSession(url) as http, http.get(path) as response:
        return orjson.loads(await response.read())


async def send_chat(url: str, content: str) -> None:
    async with aiohttp.ClientSession(url) as http, http.post(CHAT, json=chat(content)) as response:
        assert response.status == 200


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_live_and_replayed_messages_are_equal(dialect: Dialect) -> None:
    """A worker reports where it publishes, and its live and replayed messages are equal, in order, and end with their
    mark.
    """
    with worker(dialect=dialect, kv_events=0) as url:
        if dialect == "vllm":
            source = (await get_json(url, "/kv_event_sources"))["0"]
            ports = [int(source[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")]
        else:
            source = (await get_json(url, "/server_info"))["kv_events"]
            ports = [source["endpoint_port_base"], source["replay_endpoint_port_base"]]
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as past:
            live.subscribe(source["topic"])
            live.connect(f"tcp://127.0.0.1:{ports[0]}")
            past.connect(f"tcp://127.0.0.1:{ports[1]}")
            async with asyncio.timeout(PATIENCE):
                await send_chat(url, "hello, hello, hello")
                await past.send_multipart([b"", (0).to_bytes(8, "big")])
                replayed = [await past.recv_multipart()]
                while replayed[-1][-2] != b"\xff" * 8:
                    replayed.append(await past.recv_multipart())
                assert [int.from_bytes(frames[2], "big") for frames in replayed[:-1]] == list(range(len(replayed) - 1))
                received = asyncio.ensure_future(live.recv_multipart())
                prompts = count()
                while not received.done():  # messages published before the subscription is there are lost
                    await send_chat(url, f"another prompt, number {next(prompts)}")
                topic, _, payload = await received
        assert topic == source["topic"].encode()
        _, events, rank = msgpack.unpackb(payload)
        assert (events[0]["type"], events[0]["block_size"], rank) == ("BlockStored", 4, 0)
        assert len(events[0]["token_ids"]) == 4 * len(events[0]["block_hashes"])
