"""Long greedy streams that run at once, and what arrives of them if their worker is killed."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from . import prompts
from .fleet import Engine, Router
from .processes import wait_until
from .wire import CHAT, COMPLETIONS, ONE_CALL_EACH, Json, event_data, joined, listed, loads, mapped

_HTTP = httpx.Client(timeout=120, verify=False, trust_env=False, limits=ONE_CALL_EACH)
TOKENS = 600
KILLED_AFTER = 100
"""Least characters of each stream when its worker is killed.

A token is about five characters. A token does not have an event of its own: a vLLM puts several tokens into one event
when its reader is slow.
"""
_SAID = re.compile(rb'"(?:content|text)": ?"((?:[^"\\]|\\.)*+)"')
COMMON: Json = {
    **{"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True},
    "stream_options": {"include_usage": True},
}


class Said(NamedTuple):
    """The sum of a stream."""

    text: str
    roles: list[object]
    endings: list[object]
    usage: list[object]
    """Tokens of the prompt, of the answer, and of both."""


@dataclass
class Stream:
    """One call, as its client sees it."""

    path: str
    body: Json
    worker: str = ""
    """The worker, once it is known."""
    received: bytes = b""
    said_characters: int = 0
    over: bool = False

    def run(self, url: str) -> None:
        """Read the stream to its end."""
        with _HTTP.stream("POST", url + self.path, json=self.body) as response:
            self.worker = response.headers["x-d2lpm-worker"]
            for block in response.iter_bytes():
                self.received += block
                self.said_characters += sum(map(len, _SAID.findall(block)))
        self.over = True

    @property
    def said(self) -> Said:
        """Return the sum. AssertionError if the stream is not complete."""
        *events, done = event_data(self.received)
        assert done == b"[DONE]"
        *chunks, last = [loads(each) for each in events]
        assert all(listed(chunk["choices"]) for chunk in chunks), "something else than its usage has no choice"
        (choice,) = joined(chunks).values()
        usage = mapped(last["usage"])
        counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        return Said(choice.text, choice.roles, [reason for reason, _ in choice.endings], counts)


def chats(count: int) -> list[Stream]:
    messages = [[{"role": "user", "content": prompts.text(f"chat {number}", 40)}] for number in range(count)]
    return [Stream(CHAT, {**COMMON, "messages": each}) for each in messages]


def texts(count: int) -> list[Stream]:
    asked = [prompts.text(f"text {number}", 40) for number in range(count)]
    return [Stream(COMPLETIONS, {**COMMON, "prompt": each}) for each in asked]


def run_all(streams: Sequence[tuple[Router, Stream]], victim: Engine | None = None) -> bool:
    """Run all streams at once, and kill the victim when all of its streams, half of them, have begun.

    Returns whether the victim was killed. It is not if one of its streams ends before the last one has begun, as
    happens on a busy machine.
    """
    with ThreadPoolExecutor(len(streams)) as pool:
        runs = [pool.submit(stream.run, router.url) for router, stream in streams]
        killed = victim is not None and _kill_amid(streams, victim)
        for run in runs:
            run.result()
    return killed


def _kill_amid(streams: Sequence[tuple[Router, Stream]], victim: Engine) -> bool:
    name = streams[0][0].worker(victim)["id"]

    def theirs() -> list[Stream]:
        return [stream for _, stream in streams if stream.worker == name]

    def late() -> bool:
        return any(stream.over for stream in theirs())

    def under_way() -> bool:
        return len(theirs()) == len(streams) / 2 and all(each.said_characters >= KILLED_AFTER for each in theirs())

    wait_until(lambda: late() or under_way(), 60, "each of its streams is under way")
    if late():
        return False
    victim.kill()
    return True
