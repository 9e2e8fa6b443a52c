"""With KV events of a real vLLM, what the router predicts is what the engine finds in its cache."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.local_tokenizer import LocalTokenizer

from . import prompts
from .conftest import StartRouter
from .fleet import BLOCK_TOKENS, Engine, Router, launched_engine
from .processes import Server, wait_until
from .test_prefixes import BODY, ask, predicted, usage
from .wire import CHAT, Json, call, get

pytestmark = pytest.mark.engine

BLOCKS = 300
DOCUMENTS = 16
"""Of some 700 tokens each: more than twice of what fits."""
EXACT = ("--token-budget=5", "--min-match-tokens=0")


@pytest.fixture(scope="module")
def engine(servers: list[Server], model: Path, logs: Path) -> Engine:
    """An engine with a small cache that tells of it, started as the compose file starts its own."""
    flags = (f"--num-gpu-blocks-override={BLOCKS}", "--max-model-len=4096")
    small = launched_engine("vllm", "publishing engine", model, logs / "publishing", flags)
    servers.append(small)
    small.start_and_wait()
    return small


@pytest.fixture(params=["local", "asked"])
def router(request: pytest.FixtureRequest, engine: Engine, model: Path, start_router: StartRouter) -> Iterator[Router]:
    """A router that has the tokenizer, or asks the engine."""
    flags = (f"--tokenizer={model}",) if request.param == "local" else ()
    started = start_router(f"router by events, {request.param}", (engine,), *EXACT, *flags)
    wait_until_complete(started)
    yield started
    started.stop()


def wait_until_complete(router: Router) -> None:
    """Wait until all is known that the engine has told; it tells what is new, and that it was emptied, with a step."""
    ask(router, prompts.text("first", words=100), "Who?")

    def complete() -> bool:
        told = get(f"{router.url}/metrics").body.decode()
        return re.search(r"^d2lpm_kv_events_complete\{[^}]*\} 1\.0$", told, re.MULTILINE) is not None

    wait_until(complete, 10, "the engine's events are followed")


def documents(order: Iterator[int]) -> Iterator[str]:
    return (prompts.text(f"published {number}", words=230) for number in order)


def errors(router: Router, order: Iterator[int]) -> tuple[list[tuple[int, int]], int]:
    """What was predicted and found where the two differ, and how many tokens were found in all."""
    answers = [ask(router, text, f"And {turn}?") for turn, text in enumerate(documents(order))]
    pairs = [(predicted(answer), usage(answer)[1]) for answer in answers]
    return [(told, found) for told, found in pairs if told != found], sum(found for _, found in pairs)


def visits() -> Iterator[int]:
    """Documents in an order that finds some of them cached and others evicted."""
    return (turn * 7 % 5 if turn % 3 else turn % DOCUMENTS for turn in range(60))


def test_predictions_are_exact_amid_evictions(router: Router) -> None:
    """Of each request exactly so many tokens are cached as were predicted, though the cache is too small for all."""
    wrong, found = errors(router, visits())
    assert not wrong
    assert found > 10 * BLOCK_TOKENS


def test_reported_hits_do_not_mislead(router: Router) -> None:
    """A client may have its engine report hits as if they were stored: predictions stay exact for all."""
    report: Json = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    for text in documents(visits()):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Report!"}]
        assert call(router.url, CHAT, {**BODY, **report, "messages": messages}, "reporter").status == 200
    wrong, found = errors(router, visits())
    assert not wrong
    assert found > 10 * BLOCK_TOKENS


def test_a_restarted_engine_has_nothing(engine: Engine, router: Router) -> None:
    """Nothing is predicted of an engine that was killed and is back, and then again what it finds."""
    errors(router, iter(range(4)))
    engine.kill()
    wait_until(lambda: not router.worker(engine)["healthy"], 5, "the engine's death is seen")
    engine.start_and_wait()
    wait_until(lambda: bool(router.worker(engine)["healthy"]), 10, "the engine is back")
    answer = ask(router, next(documents(iter([3]))), "And?")
    assert (predicted(answer), usage(answer)[1]) == (0, 0)
    wait_until_complete(router)
    wrong, found = errors(router, iter([3, 2, 3, 2]))
    assert not wrong
    assert found


@pytest.mark.parametrize("question", ["Who?", "  two  spaces\n", "naïve 世界 🙂", "</s><|user|>"])
def test_local_tokens_are_the_engines(engine: Engine, model: Path, question: str) -> None:
    """A chat and a plain text are cut into the same tokens here and in the engine."""
    local = LocalTokenizer(model)
    messages: list[Json] = [{"role": "system", "content": prompts.text("t")}, {"role": "user", "content": question}]
    chat = call(engine.url, "/tokenize", {"model": "tiny", "messages": messages}).json["tokens"]
    text = call(engine.url, "/tokenize", {"model": "tiny", "prompt": question}).json["tokens"]
    assert local.chat(messages, {}) == chat
    assert local.text(question, special=True) == text
