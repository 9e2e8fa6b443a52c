"""Where workers publish their KV events, by what they tell of it over HTTP. Pure: answers in, addresses out.

Read in the sources of vLLM 0.33 and SGLang 0.5.23. Readers raise WorkerBroke where an answer is not what that engine
sends; one that says that nothing is published gives no source.
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
    """As ZeroMQ writes it."""
    replay: str | None = None
    """Where past messages can be had; None where nowhere."""
    topic: bytes = b""


def read_vllm_sources(body: bytes, host: str) -> tuple[KvPublisher, ...]:
    """The publishers of a vLLM at `host`, by its /kv_event_sources: a configuration by rank."""
    ranks = read_object(body)
    sources = []
    for rank in sorted(ranks, key=lambda name: int(name) if re.fullmatch(r"[0-9]{1,9}", name) else 0):
        config = ranks[rank]
        if not isinstance(config, dict):
            raise WorkerBroke("A worker's source of KV events is not an object.")
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events"):
            replay, topic = config.get("replay_endpoint"), str(config.get("topic") or "")
            sources.append(
                KvPublisher(
                    reachable(config.get("endpoint"), host),
                    None if replay is None else reachable(replay, host),
                    topic.encode(),
                )
            )
    return tuple(sources)


def read_sglang_sources(body: bytes, host: str) -> tuple[KvPublisher, ...]:
    """The publishers of an SGLang at `host`, by the descriptor in its /server_info: ports that count up by rank."""
    told = read_object(body).get("kv_events")
    if not isinstance(told, dict) or told.get("publisher") != "zmq":
        return ()
    named = told.get("endpoint_host") or "*"
    port, replay, ranks = told.get("endpoint_port_base"), told.get("replay_endpoint_port_base"), told.get("dp_size")
    topic = str(told.get("topic") or "").encode()
    count = ranks if type(ranks) is int and 0 < ranks <= 1024 else 1
    if type(port) is not int:
        raise WorkerBroke("A worker's source of KV events has no port.")
    return tuple(
        KvPublisher(
            reachable(f"tcp://{named}:{port + rank}", host),
            reachable(f"tcp://{named}:{replay + rank}", host) if type(replay) is int else None,
            topic,
        )
        for rank in range(count)
    )


READERS: Final[Mapping[str, Callable[[bytes, str], tuple[KvPublisher, ...]]]] = {
    "/kv_event_sources": read_vllm_sources,
    "/server_info": read_sglang_sources,
}
"""Where to ask, in this order, and how to read the answer; an engine of another kind answers 404."""


def reachable(endpoint: object, host: str) -> str:
    """The address at which a publisher can be reached that listens at `endpoint` on `host`.

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
