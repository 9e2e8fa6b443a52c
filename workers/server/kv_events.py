"""I/O: publish what an emulated cache stores and drops over ZeroMQ, as vLLM and SGLang do.

A message is a topic, a number and a batch of events; a second socket replays past messages. Left out: offloading,
and adapters.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

import msgpack
import zmq
import zmq.asyncio

from workers.engine.block_log import BlockEvent, Cleared, Removed, Stored, publishes_after_step
from workers.engine.engine import Engine
from workers.engine.model import Dialect

TOPIC: Final = "kv-events"
FIRST_PORT: Final = 20_000
"""Where free ports in a row are looked for first."""
LAST_PORT: Final = 30_000
"""Where the search ends: below the ports that systems give to outgoing connections."""
KEPT: Final = 10_000
"""Past messages kept for replay."""
END: Final = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Publishes the KV events of an engine at `port`, and past messages at `replay_port`."""

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        host: str,
        port: int,
        replay_port: int | None = None,
        rank: int = 0,
    ) -> None:
        """Listen on both ports. Raises RuntimeError if the engine has been used, and zmq.ZMQError for a taken port.

        `port`: 0 picks two free ports; otherwise past messages are at the next port, or at `replay_port`.
        `rank`: the data-parallel rank of the engine.
        """
        self._rank = rank
        self._engine = engine
        self._vllm = dialect == "vllm"
        self._log = engine.log_blocks()
        self._numbers = count()
        self._past = deque[tuple[bytes, bytes]](maxlen=KEPT)
        self._context = zmq.asyncio.Context()
        self._live = zmq.Context(self._context).socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            self.port = _bind(self._live, host, port)
            self.replay_port = _bind(self._replay, host, replay_port or (port + 1 if port else 0))
        except zmq.ZMQError:
            self.close()
            raise

    def after_step(self) -> None:
        """Publish new events if the engine does so after this step."""
        if publishes_after_step(self._engine):
            self.publish()

    def publish(self) -> None:
        """Publish new events, if there are any."""
        events = self._log.take()
        if events:
            payload = msgpack.packb([time.time(), [self._encoded(event) for event in events], self._rank])
            number = next(self._numbers).to_bytes(8, "big")
            self._past.append((number, payload))
            self._live.send_multipart([TOPIC.encode(), number, payload])

    async def serve_replay(self) -> None:
        """Answer requests for past messages until cancelled."""
        while True:
            caller, *rest = await self._replay.recv_multipart()
            if len(rest) == 2:
                start = int.from_bytes(rest[1], "big")
                for number, payload in list(self._past):
                    if int.from_bytes(number, "big") >= start:
                        await self._replay.send_multipart([caller, b"", TOPIC.encode(), number, payload])
                await self._replay.send_multipart([caller, b"", b"", END, b""])

    def close(self) -> None:
        """Close both sockets; unsent messages are lost."""
        self._live.close(linger=0)
        self._context.destroy(linger=0)

    def sources(self) -> dict[str, Any]:
        """Return the answer of vLLM's /kv_event_sources."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": KEPT,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": TOPIC,
        }
        return {str(self._rank): config}

    def descriptor(self) -> dict[str, Any]:
        """Return the part of SGLang's /server_info about KV events."""
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.port,
            "replay_endpoint_port_base": self.replay_port,
            "topic": TOPIC,
            "block_size": self._engine.config.block_size,
            "dp_size": 1,
        }

    def _encoded(self, event: BlockEvent) -> dict[str, Any]:
        match event:
            case Cleared():
                return {"type": "AllBlocksCleared"}
            case Removed(hashes):
                return {"type": "BlockRemoved", "block_hashes": self._names(hashes), **self._place()}
            case Stored(hashes, parent, tokens):
                return {
                    "type": "BlockStored",
                    "block_hashes": self._names(hashes),
                    "parent_block_hash": None if parent is None else self._names([parent])[0],
                    "token_ids": list(tokens),
                    "block_size": self._engine.config.block_size,
                    "lora_id": None,
                    **self._place(),
                    **(_of_vllm(len(hashes)) if self._vllm else {}),
                }

    def _place(self) -> dict[str, Any]:
        return {"medium": "GPU", "group_idx": 0} if self._vllm else {"medium": "GPU"}

    def _names(self, hashes: Any) -> list[int]:
        """Return the block hashes as published: unsigned by vLLM, signed by SGLang."""
        return [hash_ % 2**64 for hash_ in hashes] if self._vllm else list(hashes)


class RankPublishers:
    """Publishes the KV events of several ranks, each at the port after that of the rank before."""

    def __init__(self, engines: Sequence[Engine], dialect: Dialect, host: str, port: int) -> None:
        """Listen on all ports, of past messages after those of the last rank. Raises as `KvPublisher` does.

        `port`: 0 picks free ports.
        """
        self._ranks = [*_in_a_row(engines, dialect, host, port)] if port else _anywhere(engines, dialect, host)

    def after_step(self) -> None:
        """Publish the new events of each rank whose engine does so after this step."""
        for rank in self._ranks:
            rank.after_step()

    async def serve_replay(self) -> None:
        """Answer requests for past messages until cancelled."""
        await asyncio.gather(*(rank.serve_replay() for rank in self._ranks))

    def close(self) -> None:
        """Close all sockets; unsent messages are lost."""
        for rank in self._ranks:
            rank.close()

    def sources(self) -> dict[str, Any]:
        """Return the answer of vLLM's /kv_event_sources."""
        return {name: config for rank in self._ranks for name, config in rank.sources().items()}

    def descriptor(self) -> dict[str, Any]:
        """Return the part of SGLang's /server_info about KV events."""
        return {**self._ranks[0].descriptor(), "dp_size": len(self._ranks)}


def _in_a_row(engines: Sequence[Engine], dialect: Dialect, host: str, port: int) -> Iterator[KvPublisher]:
    for rank, engine in enumerate(engines):
        yield KvPublisher(engine, dialect, host, port + rank, replay_port=port + len(engines) + rank, rank=rank)


def _anywhere(engines: Sequence[Engine], dialect: Dialect, host: str) -> list[KvPublisher]:
    """Listen on free ports in a row, wherever there are as many."""
    for port in range(FIRST_PORT, LAST_PORT, 2 * len(engines)):
        ranks: list[KvPublisher] = []
        try:
            ranks.extend(_in_a_row(engines, dialect, host, port))
        except zmq.ZMQError:
            for rank in ranks:
                rank.close()
        else:
            return ranks
    raise RuntimeError(f"no {2 * len(engines)} ports in a row are free")


def _of_vllm(blocks: int) -> dict[str, Any]:
    """Return the fields of stored blocks that only vLLM publishes."""
    return {"lora_name": None, "extra_keys": [None] * blocks, "kv_cache_spec_kind": "full_attention"}


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> int:
    """Listen and return the port. Raises zmq.ZMQError if it is taken."""
    if port == 0:
        return socket.bind_to_random_port(f"tcp://{host}")
    socket.bind(f"tcp://{host}:{port}")
    return port
