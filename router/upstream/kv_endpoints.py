"""Where workers publish their KV events, as they report over HTTP. Pure: answers in, addresses out.

Taken from the sources of vLLM 0.33 and SGLang 0.5.23. Readers raise WorkerBroke if an answer is not what that engine
sends, and return no publisher if the answer says that nothing is published.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from router.api.body.json_object import read_object
from router.errors import WorkerBroke


class KvPublisher(NamedTuple):
    """One publisher: one data-parallel rank of one engine."""

    endpoint: str
    """The address in ZeroMQ's notation."""
    replay: str | None = None
    """The address that replays past messages; None if there is none."""
    topic: bytes = b""
    rank: int = 0

    def of_rank(self, rank: int) -> "KvPublisher":
        """Return the publisher of a later rank, if this is that of rank 0: each rank uses the next port."""
        replay = None if self.replay is None else _next_port(self.replay, rank)
        return self._replace(endpoint=_next_port(self.endpoint, rank), replay=replay, rank=rank)


def _next_port(endpoint: str, steps: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + steps}" if port.isdigit() else endpoint


def read_vllm_sources(body: bytes, host: str) -> tuple[KvPublisher, ...]:
    """Return the publishers of a vLLM at `host`, from its /kv_event_sources: one configuration per rank."""
    ranks = read_object(body)
    sources = []
    for rank, name in sorted((int(name) if re.fullmatch(r"[0-9]{1,9}", name) else 0, name) for name in ranks):
        config = ranks[name]
        if not isinstance(config, dict):
            raise WorkerBroke("A worker's source of KV events is not an object.")
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events"):
            replay, topic = config.get("replay_endpoint"), str(config.get("topic") or "")
            sources.append(
                KvPublisher(
                    reachable(config.get("endpoint"), host),
                    None if replay is None else reachable(replay, host),
                    topic.encode(),
                    rank,
                )
            )
    return tuple(sources)


def read_sglang_sources(body: bytes, host: str) -> tuple[KvPublisher, ...]:
    """Return the publishers of an SGLang at `host`, from its /server_info: each rank uses the next port."""
    descriptor = read_object(body).get("kv_events")
    if not isinstance(descriptor, dict) or descriptor.get("publisher") != "zmq":
        return ()
    named = descriptor.get("endpoint_host") or "*"
    port, replay, ranks = (
        descriptor.get("endpoint_port_base"),
        descriptor.get("replay_endpoint_port_base"),
        descriptor.get("dp_size"),
    )
    topic = str(descriptor.get("topic") or "").encode()
    count = ranks if type(ranks) is int and 0 < ranks <= 1024 else 1
    if type(port) is not int:
        raise WorkerBroke("A worker's source of KV events has no port.")
    return tuple(
        KvPublisher(
            reachable(f"tcp://{named}:{port + rank}", host),
            reachable(f"tcp://{named}:{replay + rank}", host) if type(replay) is int else None,
            topic,
            rank,
        )
        for rank in range(count)
    )


READERS: Final[Mapping[str, Callable[[bytes, str], tuple[KvPublisher, ...]]]] = {
    "/kv_event_sources": read_vllm_sources,
    "/server_info": read_sglang_sources,
}
"""The paths to ask, in this order, and the reader of each answer; an engine of another kind answers 404."""


def reachable(endpoint: object, host: str) -> str:
    """Return the address to reach a publisher that listens at `endpoint` on `host`.

    Raises WorkerBroke for anything but TCP with a port: other transports do not leave the worker's machine.
    """
    try:
        parts = urlsplit(endpoint if isinstance(endpoint, str) else "")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "tcp" or not port:
        raise WorkerBroke("A worker publishes KV events, but not at a TCP port.")
    named = parts.hostname or "*"
    if named in ("*", "0.0.0.0", "::"):
        named = host
    return f"tcp://[{named}]:{port}" if ":" in named else f"tcp://{named}:{port}"
