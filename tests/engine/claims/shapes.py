"""Reduces an answer to its shape: names and types of its members, and the kinds of a stream's events."""

import json

from ..wire import Answer, event_data

Shape = dict[str, "Shape"] | list["Shape"] | str
VARYING = frozenset({"logprobs", "embedding"})
"""Members whose content has no fixed names, or may be empty."""


def shape(value: object) -> Shape:
    """Return the shape of a JSON value; for a list, the different shapes of its items."""
    if isinstance(value, dict):
        return {name: type(inner).__name__ if name in VARYING else shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        found: list[Shape] = []
        for inner in map(shape, value):
            if inner not in found:
                found.append(inner)
        return found
    return type(value).__name__


def is_stream(answer: Answer) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def named_events(answer: Answer) -> list[tuple[str, str]]:
    """Return name and data of each event. The name is empty if the event has none."""
    events = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((lines.get("event", ""), lines["data"]))
    return events


def kinds(answer: Answer) -> list[tuple[str, Shape]]:
    """Return the different kinds of a stream's events, in the order of their first events.

    The count of events of one kind varies: a token may have no text, and an engine may put several into one event.
    """
    found: list[tuple[str, Shape]] = []
    for name, data in named_events(answer):
        kind = name, data if data == "[DONE]" else shape(json.loads(data))
        if kind not in found:
            found.append(kind)
    return found


def look(answer: Answer) -> tuple[int, str | None, object]:
    """Return status, content type and shape of any answer."""
    content_type = answer.headers.get("content-type")
    if is_stream(answer):
        return answer.status, content_type, kinds(answer)
    return answer.status, content_type, shape(answer.json) if content_type == "application/json" else None


def chunks(answer: Answer) -> list[bytes]:
    """Return the data of a chat's or a completion's stream. AssertionError unless it ends in [DONE]."""
    *events, done = event_data(answer.body)
    assert done == b"[DONE]"
    return events
