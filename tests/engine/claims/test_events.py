"""KV events: what a publisher sends for a stored prompt and for an emptied cache, and its replay."""

from collections.abc import Sequence
from functools import partial

import msgpack
import pytest
import zmq

from ..processes import Server, wait_until
from ..wire import COMPLETIONS, Json, call, listed
from .shapes import shape
from .sides import BLOCK_TOKENS, Published, Sides, published

pytestmark = pytest.mark.engine

END = b"\xff" * 8
WAIT_SECONDS = 20.0
Message = tuple[bytes, bytes, bytes]
"""Topic, number and payload."""


def replayed(source: Published, start: int) -> list[Message]:
    """Return the messages replayed from this number on, and the message that ends the replay."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{source.replay_port}")
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    messages: list[Message] = []
    try:
        while not messages or messages[-1][1] != END:
            assert socket.poll(int(WAIT_SECONDS * 1000)), "the past does not end"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            messages.append((topic, number, payload))
    finally:
        context.destroy(linger=0)
    return messages


def events_since(source: Published, start: int) -> list[Json]:
    """Return the events of all messages from this number on."""
    events: list[Json] = []
    for _, _, payload in replayed(source, start)[:-1]:
        moment, more, rank = msgpack.unpackb(payload)
        assert isinstance(moment, float)
        assert rank == 0
        events += more
    return events


def next_number(source: Published) -> int:
    """Return the number of the next message."""
    return len(replayed(source, 0)) - 1


def integers(value: object) -> list[int]:
    assert isinstance(value, list)
    assert all(type(each) is int for each in value)
    return value


def stored(server: Server, prompt: str) -> list[int]:
    """Have the engine store a prompt. Returns the token ids of the prompt and of the answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = call(server.url, COMPLETIONS, {**body, "return_token_ids": True})
    assert answer.status == 200, answer.body
    (choice,) = listed(answer.json["choices"])
    return [*integers(choice["prompt_token_ids"]), *integers(choice["token_ids"])]


def chain(events: Sequence[Json], ids: Sequence[int]) -> list[Json]:
    """Return the events that store these ids, from the one without a parent on, as far as they are present."""
    found: list[Json] = []
    length = 0
    for event in events:
        tokens = integers(event["token_ids"]) if event["type"] == "BlockStored" else []
        parent = integers(found[-1]["block_hashes"])[-1] if found else None
        if tokens and event["parent_block_hash"] == parent and tokens == list(ids[length : length + len(tokens)]):
            found.append(event)
            length += len(tokens)
    return found


def events_of(sides: Sides, server: Server, prompt: str) -> tuple[list[int], list[Json]]:
    """Have a new prompt stored. Returns its ids and the answer's, and their events.

    The events cover, in whole blocks, all but the last token, from which no other has been computed.
    """
    source, size = published(sides.dialect, server), BLOCK_TOKENS[sides.dialect]
    start = next_number(source)
    ids = stored(server, prompt)
    whole = (len(ids) - 1) // size * size

    def found() -> list[Json]:
        return chain(events_since(source, start), ids)

    def complete() -> bool:
        return sum(len(integers(event["token_ids"])) for event in found()) >= whole

    wait_until(complete, WAIT_SECONDS, f"{whole} of {len(ids)} tokens are reported")
    return ids, found()


def test_a_stored_prompt(sides: Sides, server: Server) -> None:
    """The events of a stored prompt form a chain in blocks of the reported size, up to the answer's last token but one.

    The first event has no parent. vLLM's block numbers are unsigned, SGLang's signed.
    """
    size = BLOCK_TOKENS[sides.dialect]
    ids, events = events_of(sides, server, f"a prompt of {server.name} that fills some blocks, as it is long " * 40)
    assert sum(len(integers(event["token_ids"])) for event in events) == (len(ids) - 1) // size * size
    names: list[int] = []
    for event in events:
        hashes = integers(event["block_hashes"])
        assert (event["block_size"], event["medium"]) == (size, "GPU")
        assert len(hashes) * size == len(integers(event["token_ids"]))
        names += hashes
    assert len(set(names)) == len(names) > 12
    assert (min(names) < 0) == (sides.dialect == "sglang")


def test_what_an_event_consists_of(sides: Sides) -> None:
    """Events of stored blocks have the same fields in both engines, for the first event of a prompt and for later
    ones.
    """
    shapes = []
    for server in sides.each():
        _, events = events_of(sides, server, f"another prompt of {server.name} that fills blocks " * 20)
        assert len(events) > 1
        shapes.append([shape(event) for event in (events[0], events[-1])])
    assert shapes[1] == shapes[0]


def test_blocks_of_a_salted_prompt_say_so(sides: Sides) -> None:
    """The first event of a salted prompt has the salt, in vLLM inside the keys of its block, in SGLang as its own
    field.
    """
    source = published(sides.dialect, sides.real)
    start = next_number(source)
    body = {
        "model": "tiny",
        "prompt": "a salted prompt that fills blocks " * 30,
        "max_tokens": 2,
        "cache_salt": "salty",
    }
    assert call(sides.real.url, COMPLETIONS, body).status == 200

    def salted() -> bool:
        salts = [event.get("cache_salt") or event.get("extra_keys") for event in events_since(source, start)]
        return "salty" in salts or any(isinstance(keys, list) and keys[0] == ["salty"] for keys in salts)

    wait_until(salted, WAIT_SECONDS, "the salt is reported")


def test_an_emptied_cache(sides: Sides) -> None:
    """One event without content reports it, at the latest with the engine's next step."""
    path = "/flush_cache" if sides.dialect == "sglang" else "/reset_prefix_cache"
    step: Json = {"model": "tiny", "prompt": [7], "max_tokens": 1}
    for server in sides.each() if sides.dialect == "sglang" else (sides.real,):
        source = published(sides.dialect, server)
        start = next_number(source)
        assert [call(server.url, each, body).status for each, body in ((path, {}), (COMPLETIONS, step))] == [200, 200]
        wait_until(partial(is_reported_empty, source, start), WAIT_SECONDS, "that it is empty")


def is_reported_empty(source: Published, start: int) -> bool:
    return {"type": "AllBlocksCleared"} in events_since(source, start)


def test_the_past(sides: Sides, server: Server) -> None:
    """A publisher replays all messages in order and without a gap, ends with an empty one numbered -1, and sends
    only that one if asked for numbers beyond the last.
    """
    events_of(sides, server, f"the last prompt of {server.name} that fills blocks " * 20)
    source = published(sides.dialect, server)
    *past, end = replayed(source, 0)
    assert end[1:] == (END, b"")
    assert [int.from_bytes(number, "big") for _, number, _ in past] == list(range(len(past)))
    assert {topic for topic, _, _ in past} == {source.topic.encode()}
    assert replayed(source, len(past) - 1)[0] == past[-1]
    assert [number for _, number, _ in replayed(source, len(past) + 100)] == [END]


def test_the_present(sides: Sides, server: Server) -> None:
    """A subscriber gets the same messages as a replay."""
    source = published(sides.dialect, server)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(f"tcp://127.0.0.1:{source.port}")
    socket.subscribe(source.topic.encode())
    try:
        for attempt in range(50):  # the first ones may be sent before the connection is up
            stored(server, f"knock {attempt} at {server.name}, and wait whether anybody answers to it " * 6)
            if socket.poll(500):
                break
        topic, number, payload = socket.recv_multipart()
    finally:
        context.destroy(linger=0)
    assert replayed(source, int.from_bytes(number, "big"))[0] == (topic, number, payload)


def test_block_size_is_reported(sides: Sides) -> None:
    """SGLang reports it with its ports; vLLM does not."""
    sizes = [published(sides.dialect, server).block_tokens for server in sides.each()]
    expected = BLOCK_TOKENS["sglang"] if sides.dialect == "sglang" else None
    assert sizes == [expected, expected]
