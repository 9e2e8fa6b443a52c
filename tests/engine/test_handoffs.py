"""Prefill and decode at two real vLLM servers with NixlConnector, over TCP on this machine."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import prompts
from .nixl_pair import Pair, computed, read_late, router_before, running_pair
from .processes import Server, wait_until
from .wire import CHAT, COMPLETIONS, Answer, Json, call, listed, mapped

pytestmark = pytest.mark.engine

CALLS = 200
AT_ONCE = 4


@pytest.fixture(scope="module")
def pair(servers: list[Server], model: Path, logs: Path) -> Iterator[Pair]:
    yield from running_pair(servers, model, logs, 30)


def body_of(number: int) -> tuple[str, Json]:
    """Return the path and the body of one of the calls: every kind, with prompts of different lengths."""
    text = prompts.text(f"handed over {number}", 40 + 5 * (number % 40))
    usual: Json = {"model": "tiny", "max_tokens": 8 + number % 9, "temperature": 0, "stream": number % 2 == 1}
    if usual["stream"]:
        usual["stream_options"] = {"include_usage": True}
    if number % 4 < 2:
        return CHAT, {**usual, "messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, {**usual, "prompt": text}


def read(path: str, body: Json, answer: Answer) -> tuple[str, Json]:
    """Return the text and the usage of an answer."""
    assert answer.status == 200, answer.body
    parts = answer.events() if body["stream"] else [answer.json]
    text = ""
    usage: Json = {}
    for part in parts:
        usage = mapped(part["usage"]) if part.get("usage") else usage
        for choice in listed(part["choices"]):
            holder = choice if path == COMPLETIONS else mapped(choice["delta" if body["stream"] else "message"])
            text += str(holder.get("text" if path == COMPLETIONS else "content") or "")
    return text, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def answers(url: str, numbers: Sequence[int]) -> list[tuple[str, Json]]:
    """Return the answers of a server to these calls."""

    def ask(number: int) -> tuple[str, Json]:
        path, body = body_of(number)
        return read(path, body, call(url, path, body))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, numbers))


def test_answers_are_those_of_one_engine(pair: Pair, logs: Path) -> None:
    """Text and usage of every call, streamed or not; the decode engine computes a token of each prompt, if any."""
    router = router_before(pair, logs)
    try:
        before = computed(pair.prefill), computed(pair.decode)
        handed = answers(router.url, range(CALLS))
        prefilled, decoded = computed(pair.prefill) - before[0], computed(pair.decode) - before[1]
        wait_until(lambda: not router.unfinished(), 10, "nothing is left")
    finally:
        router.stop()
    truth = answers(pair.prefill.url, range(CALLS))
    assert handed == truth
    asked = sum(int(str(usage["prompt_tokens"])) for _, usage in truth)
    assert prefilled >= 0.8 * asked
    assert decoded <= CALLS
    assert read_late(pair.prefill) == 0
