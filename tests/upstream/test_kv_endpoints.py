"""Where engines report that they publish their KV events."""

import httpx
import pytest

from router.errors import WorkerBroke
from router.upstream.kv_endpoints import KvPublisher, reachable, read_sglang_sources, read_vllm_sources


def test_the_publishers_of_a_vllm_are_read() -> None:
    """Each rank has a publisher; one that listens on all interfaces is reached at the worker's own host."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    ranks = {
        "1": config | {"endpoint": "tcp://*:5558", "replay_endpoint": None},
        "0": config | {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://10.0.0.7:6000"},
        "2": config | {"enable_kv_cache_events": False},
    }
    assert read_vllm_sources(_json(ranks), "gpu1") == (
        KvPublisher("tcp://gpu1:5557", "tcp://10.0.0.7:6000", b"kv"),
        KvPublisher("tcp://gpu1:5558", None, b"kv", 1),
    )
    assert read_vllm_sources(b"{}", "gpu1") == ()


def test_the_publishers_of_an_sglang_are_read() -> None:
    """Ports count up by rank; a server without KV events has no publisher."""
    info = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "dp_size": 2}
    body = _json({"kv_events": info | {"replay_endpoint_port_base": 6000}})
    assert read_sglang_sources(body, "::1") == (
        KvPublisher("tcp://[::1]:5557", "tcp://[::1]:6000", b"kv"),
        KvPublisher("tcp://[::1]:5558", "tcp://[::1]:6001", b"kv", 1),
    )
    assert read_sglang_sources(_json({"kv_events": None}), "gpu1") == ()
    assert read_sglang_sources(b"{}", "gpu1") == ()


@pytest.mark.parametrize("endpoint", [None, 7, "", "ipc:///tmp/x", "tcp://*", "tcp://*:nan", "tcp://h:99999"])
def test_an_unreachable_endpoint_is_refused(endpoint: object) -> None:
    """A publisher that no other machine can reach is not subscribed to."""
    with pytest.raises(WorkerBroke):
        reachable(endpoint, "gpu1")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"0": 7}', b"\xff"])
def test_an_invalid_answer_about_publishers_is_refused(body: bytes) -> None:
    """An answer that is not what an engine sends is refused."""
    with pytest.raises(WorkerBroke):
        read_vllm_sources(body, "gpu1")


def _json(body: object) -> bytes:
    return httpx.Request("POST", "http://x", json=body).content
