"""KV events: what a publisher sends for a prompt that is stored, for a cache that is emptied, and as its past."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
import zmq

from ..processes import Server
from ..wire import COMPLETIONS, Json, call, listed
from .shapes import shape
from .sides import BLOCK_TOKENS, Sides, published

pytestmark = pytest.mark.engine

END = b"\xff" * 8
WAIT_MS = 15_000
Events = list[Json]


@contextmanager
def subscribed(sides: Sides, server: Server) -> Iterator[zmq.SyncSocket]:
    """A connection that has begun to hear what is published: it is known by an event of its own."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    source = published(sides.dialect, server)
    socket.connect(f"tcp://127.0.0.1:{source.port}")
    socket.subscribe(source.topic.encode())
    try:
        for attempt in range(100):
            stored(server, f"knock {attempt} at {server.name}, and wait whether anybody answers it " * 6)
            if socket.poll(200):
                break
        while socket.poll(500):
            socket.recv_multipart()
        yield socket
    finally:
        context.destroy(linger=0)


def stored(server: Server, prompt: object) -> list[int]:
    """Have a prompt stored; its ids and those of the answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = call(server.url, COMPLETIONS, {**body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    (choice,) = listed(answer.json["choices"])
    return [*integers(choice["prompt_token_ids"]), *integers(choice["token_ids"])]


def integers(value: object) -> list[int]:
    assert isinstance(value, list)
    assert all(type(each) is int for each in value)
    return value


def received(socket: zmq.SyncSocket, least: int) -> list[tuple[bytes, int, Events]]:
    """Messages with at least so many events: topic, number, events."""
    messages: list[tuple[bytes, int, Events]] = []
    while sum(len(events) for _, _, events in messages) < least:
        assert socket.poll(WAIT_MS), f"only {messages}"
        topic, number, payload = socket.recv_multipart()
        moment, events, rank = msgpack.unpackb(payload)
        assert isinstance(moment, float)
        assert rank == 0
        messages.append((topic, int.from_bytes(number, "big"), events))
    return messages


def stored_tokens(socket: zmq.SyncSocket, wanted: int) -> Events:
    """Events of stored blocks until they have so many tokens."""
    events: Events = []
    while sum(len(integers(event["token_ids"])) for event in events) < wanted:
        events += [event for _, _, more in received(socket, 1) for event in more if event["type"] == "BlockStored"]
    return events


def test_a_stored_prompt(sides: Sides, server: Server) -> None:
    """Its events chain from no parent on, in blocks of the size that is told, through all of prompt and answer but the
    last token; vLLM names blocks by numbers without a sign, SGLang with one.
    """
    size = BLOCK_TOKENS[sides.dialect]
    with subscribed(sides, server) as socket:
        ids = stored(server, f"a prompt of {server.name} that fills some blocks, as it is long enough for that " * 30)
        whole = (len(ids) - 1) // size * size
        events = stored_tokens(socket, whole)
    assert [token for event in events for token in integers(event["token_ids"])] == ids[:whole]
    parent: int | None = None
    names: list[int] = []
    for event in events:
        hashes = integers(event["block_hashes"])
        assert (event["block_size"], event["parent_block_hash"], event["medium"]) == (size, parent, "GPU")
        assert len(hashes) * size == len(integers(event["token_ids"]))
        parent = hashes[-1]
        names += hashes
    assert len(set(names)) == len(names) > 12
    assert (min(names) < 0) == (sides.dialect == "sglang")


def test_what_an_event_consists_of(sides: Sides) -> None:
    """Events of stored blocks have the same members at both, the first one of a prompt and the next."""
    shapes = []
    for server in sides.each():
        with subscribed(sides, server) as socket:
            ids = stored(server, f"another prompt of {server.name} that fills blocks " * 20)
            size = BLOCK_TOKENS[sides.dialect]
            events = stored_tokens(socket, (len(ids) - 1) // size * size)
        shapes.append([shape(event) for event in (events[0], events[-1])])
    assert shapes[1] == shapes[0]


def test_blocks_of_a_salted_prompt_say_so(sides: Sides) -> None:
    """The first event names the salt: vLLM's in the keys of its block, SGLang's by itself."""
    body = {
        "model": "tiny",
        "prompt": "a salted prompt that fills blocks " * 30,
        "max_tokens": 2,
        "cache_salt": "salty",
    }
    with subscribed(sides, sides.real) as socket:
        assert call(sides.real.url, COMPLETIONS, body).status == 200
        first = stored_tokens(socket, 1)[0]
    if sides.dialect == "sglang":
        assert first["cache_salt"] == "salty"
    else:
        keys = first["extra_keys"]
        assert isinstance(keys, list)
        assert keys[0] == ["salty"]


def test_an_emptied_cache(sides: Sides) -> None:
    """It is told by one event without anything in it, with the engine's next step: an idle one tells nothing."""
    path = "/flush_cache" if sides.dialect == "sglang" else "/reset_prefix_cache"
    for server in sides.each() if sides.dialect == "sglang" else (sides.real,):
        with subscribed(sides, server) as socket:
            assert call(server.url, path, {}).status == 200
            assert not socket.poll(0)
            step: Json = {"model": "tiny", "prompt": [7], "max_tokens": 1}
            assert call(server.url, COMPLETIONS, step).status == 200
            ((_, _, events),) = received(socket, 1)
        assert events[0] == {"type": "AllBlocksCleared"}


def test_the_past(sides: Sides, server: Server) -> None:
    """Asked for all, a publisher sends every message again, in order and without a gap, and then an empty one with the
    number -1; asked for more than there is, that alone.
    """
    source = published(sides.dialect, server)
    with subscribed(sides, server) as socket:
        stored(server, f"the last prompt of {server.name} that fills blocks " * 20)
        topic, last, _ = received(socket, 1)[-1]
        while socket.poll(1000):
            topic, last, _ = received(socket, 1)[-1]
    assert topic == source.topic.encode()
    past = replayed(source.replay_port, 0)
    assert past[-1] == (END, b"")
    assert [int.from_bytes(number, "big") for number, _ in past[:-1]] == list(range(last + 1))
    assert [number for number, _ in replayed(source.replay_port, last)] == [last.to_bytes(8, "big"), END]
    assert replayed(source.replay_port, last + 1) == [(END, b"")]


def replayed(port: int, start: int) -> list[tuple[bytes, bytes]]:
    """Number and payload of what is sent again, up to the end."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    messages: list[tuple[bytes, bytes]] = []
    try:
        while not messages or messages[-1][0] != END:
            assert socket.poll(WAIT_MS), "the past does not end"
            empty, _topic, number, payload = socket.recv_multipart()
            assert empty == b""
            messages.append((number, payload))
    finally:
        context.destroy(linger=0)
    return messages


def test_block_size_is_told(sides: Sides) -> None:
    """SGLang tells it where it tells its ports; vLLM does not."""
    sizes = [published(sides.dialect, server).block_tokens for server in sides.each()]
    expected = BLOCK_TOKENS["sglang"] if sides.dialect == "sglang" else None
    assert sizes == [expected, expected]
