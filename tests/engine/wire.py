"""Sends calls and reads answers as bytes, without the leniency of a client library."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import httpx

Json = dict[str, object]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WORKER_KEY = "the-engines-own-key"

# Threads share these clients. No idle connection is kept, as the pool may close one that a thread has just been given.
ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)
_HTTP = httpx.Client(timeout=30.0, verify=False, trust_env=False, limits=ONE_CALL_EACH)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        parsed: Json = loads(self.body)
        return parsed

    def events(self) -> list[Json]:
        """Return the stream's events in order. AssertionError unless the stream ends in [DONE]."""
        *events, done = event_data(self.body)
        assert done == b"[DONE]"
        return [loads(event) for event in events]


def event_data(stream: bytes) -> Iterator[bytes]:
    """Yield the data of each server-sent event.

    Comments and blank lines are skipped; any other field is an AssertionError.
    """
    assert stream.endswith(b"\n\n"), f"the stream ends within an event: {stream[-80:]!r}"
    for block in stream.removesuffix(b"\n\n").split(b"\n\n"):
        if not block or block.startswith(b":"):
            continue
        assert block.startswith(b"data: "), f"not an event: {block[:80]!r}"
        assert b"\n" not in block, f"an event of several lines: {block[:80]!r}"
        yield block.removeprefix(b"data: ")


def loads(text: bytes) -> Json:
    """Parse JSON. AssertionError if an object has a key twice, as a wrongly spliced event could have."""
    parsed: Json = json.loads(text, object_pairs_hook=_without_repeats)
    return parsed


def _without_repeats(pairs: list[tuple[str, object]]) -> Json:
    assert len(dict(pairs)) == len(pairs), f"a key is listed twice: {[key for key, _ in pairs]}"
    return dict(pairs)


def call(url: str, path: str, body: Mapping[str, object] | bytes, key: str = WORKER_KEY) -> Answer:
    """POST a body and read the answer to its end."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return _answer(_HTTP.post(url + path, content=content, headers=headers))


def get(url: str, key: str | None = None) -> Answer:
    return _answer(_HTTP.get(url, headers={} if key is None else {"authorization": f"Bearer {key}"}))


def _answer(response: httpx.Response) -> Answer:
    return Answer(response.status_code, response.headers, response.content)


def without(body: Mapping[str, object], *keys: str) -> Json:
    return {key: value for key, value in body.items() if key not in keys}


def shape(value: object) -> object:
    """Return the fields and their types, whatever their values. The keys of logprobs are tokens and are left out."""
    if isinstance(value, dict):
        return frozenset((key, type(inner) if key == "logprobs" else shape(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return frozenset(shape(inner) for inner in value if isinstance(inner, dict))
    return type(value)


def listed(value: object) -> list[Json]:
    """Return the value as a JSON array of objects. AssertionError if it is no array."""
    assert isinstance(value, list)
    return value


def mapped(value: object) -> Json:
    """Return the value as a JSON object. AssertionError if it is none."""
    assert isinstance(value, dict)
    return value


@dataclass(slots=True)
class Choice:
    """The sum of the deltas of one choice."""

    text: str = ""
    roles: list[object] = field(default_factory=list)
    endings: list[tuple[object, object]] = field(default_factory=list)
    """Finish reason and stop reason; there should be one pair."""
    logprobs: list[object] = field(default_factory=list)
    usage: object = None
    """The last usage that came with a delta of the choice, if usage comes with each."""


def joined(events: Iterable[Json]) -> dict[object, Choice]:
    """Return the stream's choices by index.

    An engine may put several tokens into one event when its reader is slow, so events are not compared one by one.
    """
    choices: dict[object, Choice] = {}
    for event in events:
        for part in listed(event["choices"]):
            choice = choices.setdefault(part["index"], Choice())
            delta = mapped(part.get("delta", {}))
            choice.text += str(part.get("text") or delta.get("content") or "")
            choice.roles += [delta["role"]] if "role" in delta else []
            choice.endings += [(part["finish_reason"], _stop(part))] if part["finish_reason"] else []
            choice.logprobs += _token_logprobs(part["logprobs"])
            choice.usage = event.get("usage") or choice.usage
    return choices


def _stop(part: Json) -> object:
    """Return the stop reason of a choice, by vLLM's name or by SGLang's."""
    return part["stop_reason"] if "stop_reason" in part else part["matched_stop"]


def _token_logprobs(logprobs: object) -> list[object]:
    """Return one entry per token, from the form of either endpoint."""
    if logprobs is None:
        return []
    both = mapped(logprobs)
    if "content" in both:
        return [*listed(both["content"])]
    return list(zip(listed(both["tokens"]), listed(both["token_logprobs"]), strict=True))
