"""With an engine's KV events, the router's predictions equal what the engine finds in its cache."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from router.kv_events.local_tokenizer import LocalTokenizer

from . import prompts
from .conftest import StartRouter
from .fleet import Engine, Router
from .processes import wait_until
from .relay import Relay
from .test_prefixes import BODY, ask, messages, predicted, usage
from .wire import CHAT, Json, call, get

pytestmark = [pytest.mark.engine, pytest.mark.fleets("small vllm", "small sglang")]

DOCUMENTS = 30
"""Documents of about 510 tokens: half as many again as fit into the cache, some asked about far more often than
others.
"""
BEFORE_ALL = 100
"""Tokens that prompts may share without sharing a document."""
EXACT = ("--token-budget=5", "--min-match-tokens=0")
SEEN_SECONDS = 60.0
"""Timeout for the router to see what an engine does."""
MISJUDGED = 0.05
"""Share of the calls for which the mirror may be wrong by more than a block. It may always be wrong by one block,
since it estimates the length of a prompt, and a cache keeps whole blocks.
"""


@pytest.fixture
def engine(engines: tuple[Engine, ...]) -> Engine:
    """Return an engine with a small cache that publishes KV events, started like the compose file's."""
    return engines[0]


@pytest.fixture(params=["local", "asked"])
def router(request: pytest.FixtureRequest, engine: Engine, model: Path, start_router: StartRouter) -> Iterator[Router]:
    """Start a router that has the tokenizer, or one that asks the engine for token ids."""
    flags = (f"--tokenizer={model}",) if request.param == "local" else ()
    started = start_router(f"router by events, {request.param}", (engine,), *EXACT, *flags)
    wait_until_complete(started)
    yield started
    started.stop()


def wait_until_complete(router: Router) -> None:
    """Wait until the router has all the engine's events; an engine publishes new and emptied blocks with a step."""
    ask(router, prompts.text("first", words=100), "Who?")

    def complete() -> bool:
        metrics = get(f"{router.url}/metrics").body.decode()
        return re.search(r"^d2lpm_kv_events_complete\{[^}]*\} 1\.0$", metrics, re.MULTILINE) is not None

    wait_until(complete, SEEN_SECONDS, "the engine's events are followed")


def documents(order: Sequence[int]) -> Iterator[str]:
    return (prompts.text(f"published {number}", words=230) for number in order)


class Visits(NamedTuple):
    """The results of asking about documents one after the other."""

    wrong: list[tuple[int, int]]
    """Predicted and found tokens where they differ."""
    off: int
    """Total tokens of these differences."""
    found: int
    """Total tokens found cached."""
    lost: int
    """Documents asked about before of which nothing was cached any more."""
    prompts: int
    """Tokens of all prompts."""


def visit(router: Router, order: Sequence[int]) -> Visits:
    answers = [ask(router, text, f"And {turn}?") for turn, text in enumerate(documents(order))]
    pairs = [(predicted(answer), usage(answer)[1]) for answer in answers]
    wrong = [(expected, found) for expected, found in pairs if expected != found]
    return Visits(
        wrong,
        sum(abs(expected - found) for expected, found in wrong),
        sum(found for _, found in pairs),
        sum(number in order[:turn] and pairs[turn][1] < BEFORE_ALL for turn, number in enumerate(order)),
        sum(usage(answer)[0] for answer in answers),
    )


def some() -> list[int]:
    """Return documents in an order that finds some of them cached and others evicted."""
    return random.Random("visits").choices(range(DOCUMENTS), [1 / (rank + 1) for rank in range(DOCUMENTS)], k=90)


def test_predictions_are_exact_amid_evictions(router: Router, engine: Engine) -> None:
    """Each request has exactly the predicted number of cached tokens, though the cache is too small for all."""
    seen = visit(router, some())
    assert not seen.wrong
    assert seen.found > 10 * engine.block_tokens
    assert seen.lost


@pytest.mark.fleets("small vllm")
def test_reported_hits_do_not_mislead(router: Router, engine: Engine) -> None:
    """If a client makes its engine report hits like stored blocks, predictions stay exact for all clients."""
    report: Json = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    for text in documents(some()):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Report!"}]
        assert call(router.url, CHAT, {**BODY, **report, "messages": messages}, "reporter").status == 200
    seen = visit(router, some())
    assert not seen.wrong
    assert seen.found > 10 * engine.block_tokens
    assert seen.lost


def test_a_router_that_comes_late_hears_of_all_before(engine: Engine, model: Path, start_router: StartRouter) -> None:
    """The replay shows a new router what other routers' calls left in the engine's cache."""
    texts = [prompts.text(f"before {number}", words=230) for number in range(3)]
    for text in texts:
        assert call(engine.url, CHAT, {**BODY, "messages": messages(text, "First?")}).status == 200
    late = start_router("late router", (engine,), *EXACT, f"--tokenizer={model}")
    try:
        wait_until_complete(late)
        answers = [ask(late, text, "Second?") for text in texts]
    finally:
        late.stop()
    assert [predicted(answer) for answer in answers] == [usage(answer)[1] for answer in answers]
    assert all(predicted(answer) for answer in answers)


def test_what_was_published_while_the_connection_was_lost_is_replayed(
    engine: Engine, model: Path, start_router: StartRouter, tmp_path: Path
) -> None:
    """After reconnecting, the router has the events that it missed, of prompts that it did not send."""
    with Relay(engine.events_port) as relay:
        worker = {"url": engine.url, "kv_events": f"tcp://127.0.0.1:{relay.port}"}
        worker["kv_replay"] = f"tcp://127.0.0.1:{engine.events_port + 1}"
        config = tmp_path / "router.yaml"
        config.write_text(json.dumps({"worker": [worker]}))
        router = start_router("cut off router", (), f"--config={config}", *EXACT, f"--tokenizer={model}")
        try:
            wait_until_complete(router)
            texts = [prompts.text(f"unheard {number}", words=230) for number in range(3)]
            relay.cut()
            for text in texts:
                assert call(engine.url, CHAT, {**BODY, "messages": messages(text, "First?")}).status == 200
            relay.mend()
            wait_until_complete(router)
            answers = [ask(router, text, "Second?") for text in texts]
        finally:
            router.stop()
    assert [predicted(answer) for answer in answers] == [usage(answer)[1] for answer in answers]
    assert all(predicted(answer) for answer in answers)


def test_the_mirror_is_nearly_right_amid_evictions(start_router: StartRouter, engine: Engine) -> None:
    """Without events, the router's own replica of the cache predicts the hits, except for a small share."""
    engine.flush()
    router = start_router("mirroring router", (engine,), "--kv-events=off")
    try:
        seen = visit(router, some())
    finally:
        router.stop()
    print(json.dumps({"engine": engine.dialect, "mirror's error": seen.off / seen.prompts, "lost": seen.lost}))
    misjudged = [pair for pair in seen.wrong if abs(pair[0] - pair[1]) > engine.block_tokens]
    assert len(misjudged) <= MISJUDGED * len(some())
    assert seen.found > 10 * engine.block_tokens
    assert seen.lost


def test_a_restarted_engine_has_nothing(engine: Engine, router: Router) -> None:
    """Nothing is predicted for an engine that was killed and restarted; then predictions match its hits again."""
    visit(router, range(4))
    engine.kill()
    wait_until(lambda: not router.worker(engine)["healthy"], SEEN_SECONDS, "the engine's death is seen")
    engine.start_and_wait()
    wait_until(lambda: bool(router.worker(engine)["healthy"]), SEEN_SECONDS, "the engine is back")
    answer = ask(router, next(documents([3])), "And?")
    assert (predicted(answer), usage(answer)[1]) == (0, 0)
    wait_until_complete(router)
    seen = visit(router, [3, 2, 3, 2])
    assert not seen.wrong
    assert seen.found


@pytest.mark.parametrize("question", ["Who?", "  two  spaces\n", "naïve 世界 🙂", "</s><|user|>"])
def test_local_tokens_are_the_engines(engine: Engine, model: Path, question: str) -> None:
    """A chat and a plain text have the same tokens here and in the engine."""
    local = LocalTokenizer(model)
    turns = messages(prompts.text("t"), question)
    chat = call(engine.url, "/tokenize", {"model": "tiny", "messages": turns}).json["tokens"]
    text = call(engine.url, "/tokenize", {"model": "tiny", "prompt": question}).json["tokens"]
    assert local.chat(turns, {}) == chat
    assert local.text(question, special=True) == text
