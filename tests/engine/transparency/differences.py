"""What differs between two answers, apart from what no two answers of an engine have in common."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from ..wire import Answer

OF_THE_CONNECTION = frozenset({"date", "server", "connection", "keep-alive", "transfer-encoding", "content-length"})
"""Headers about one connection or one body, not about the answer; bodies are compared themselves."""
OF_THE_ROUTER = "x-d2lpm-"
VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "request_id", "weight_version_start", "e2e_latency"}
)
"""Members that are new in each answer: ids and times."""


class Difference(NamedTuple):
    """One part of an answer that is not as the engine sent it."""

    part: str
    """`status`, `header NAME`, or `body` with the place in it."""
    direct: object
    routed: object

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.part}: {_short(self.direct)} -> {_short(self.routed)}"


ABSENT = "(absent)"


def differences(direct: Answer, routed: Answer) -> Iterator[Difference]:
    """Yield each difference of status, headers and body; of answers with other statuses, only these two."""
    if direct.status != routed.status:
        yield Difference("status", direct.status, routed.status)
        yield Difference("body", direct.body.decode(errors="replace"), routed.body.decode(errors="replace"))
        return
    ours, theirs = _headers(routed.headers), _headers(direct.headers)
    for name in sorted(ours.keys() | theirs.keys()):
        pair = theirs.get(name, ABSENT), ours.get(name, ABSENT)
        if pair[0] != pair[1]:
            yield Difference(f"header {name}", *pair)
    yield from _compared("body", _body(direct), _body(routed))


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    lower = {name.lower(): value for name, value in headers.items()}
    if "location" in lower:
        lower["location"] = urlsplit(lower["location"])._replace(scheme="", netloc="").geturl()
    return {
        name: value
        for name, value in lower.items()
        if name not in OF_THE_CONNECTION and not name.startswith(OF_THE_ROUTER)
    }


def _body(answer: Answer) -> object:
    if "event-stream" in answer.headers.get("content-type", ""):
        return _stream(answer.body)
    try:
        return _steady(json.loads(answer.body))
    except ValueError:
        return answer.body.decode(errors="replace")


def _stream(body: bytes) -> object:
    """Return the events of a stream as lists of their forms, and the text and the last numbers that they carry.

    An engine puts several tokens into one event when its reader is slow, so equal forms in a row count as one.
    """
    forms: list[object] = []
    last: dict[str, object] = {}
    for block in body.split(b"\n\n"):
        for line in block.splitlines():
            name, _, value = line.partition(b": ")
            try:
                parsed = _steady(json.loads(value))
            except ValueError:
                parsed = value.decode(errors="replace")
            form = name.decode(errors="replace"), _form(parsed)
            if not forms or form not in forms[-3:]:
                forms.append(form)
            _collect("", parsed, last)
    return {"events": forms, **last}


def _form(value: object) -> object:
    """Return names and types, without values. The keys of `top_logprobs` are tokens and are left out."""
    if isinstance(value, dict):
        return {key: type(inner).__name__ if key == "top_logprobs" else _form(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_form(inner) for inner in value[:1]]
    return type(value).__name__


def _collect(place: str, value: object, into: dict[str, object]) -> None:
    """Join the texts at each place of a stream's events; of everything else keep the last value."""
    if isinstance(value, dict):
        index = f"[{value['index']}]" if "index" in value else ""
        for key, inner in value.items():
            _collect(f"{place}{index}.{key}", inner, into)
    elif isinstance(value, list):
        if value and all(isinstance(item, dict) for item in value):
            for item in value:
                _collect(place, item, into)
        else:
            before = into.get(place)
            into[place] = [*(before if isinstance(before, list) else []), *value]
    elif isinstance(value, str) and place.endswith((".content", ".text", ".delta", ".output_text")):
        into[place] = f"{into.get(place, '')}{value}"
    elif value is not None:
        into[place] = value


def _steady(value: object) -> object:
    """Return a parsed body with the types of its volatile members in place of their values."""
    if isinstance(value, dict):
        return {
            key: type(inner).__name__ if key in VOLATILE and not isinstance(inner, dict | list) else _steady(inner)
            for key, inner in value.items()
        }
    return [_steady(inner) for inner in value] if isinstance(value, list) else value


def _compared(place: str, direct: object, routed: object) -> Iterator[Difference]:
    if isinstance(direct, dict) and isinstance(routed, dict):
        for key in (*direct, *(key for key in routed if key not in direct)):
            yield from _compared(f"{place}.{key}", direct.get(key, ABSENT), routed.get(key, ABSENT))
    elif _same_length(direct, routed):
        for at, (one, other) in enumerate(zip(direct, routed, strict=True)):  # type: ignore[call-overload]
            yield from _compared(f"{place}[{at}]", one, other)
    elif direct != routed:
        yield Difference(place, direct, routed)


def _same_length(direct: object, routed: object) -> bool:
    return (
        isinstance(direct, Sequence)
        and isinstance(routed, Sequence)
        and not isinstance(direct, str)
        and not isinstance(routed, str)
        and len(direct) == len(routed)
    )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}..."
