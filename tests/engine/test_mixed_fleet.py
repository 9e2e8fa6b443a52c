"""Tests a fleet of a vLLM and an SGLang with the same model: clients need not know which of the two answers."""

import json
from collections.abc import Iterator

import pytest

from . import prompts
from .conftest import StartRouter
from .fleet import Engine, Router
from .streams import TOKENS, Stream, chats, run_all, texts
from .test_prefixes import worker
from .wire import CHAT, COMPLETIONS, Json, call, joined, without

pytestmark = [pytest.mark.engine, pytest.mark.fleets("mixed")]

ON_THE_VICTIM = 10
"""Streams at the engine that is killed; as many run at the other one."""
BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 12}
ASKED: dict[str, Json] = {
    CHAT: {**BODY, "messages": [{"role": "user", "content": prompts.text("mixed chat")}]},
    COMPLETIONS: {**BODY, "prompt": prompts.text("mixed text")},
}


@pytest.fixture
def in_turn(start_router: StartRouter, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """Start a router that gives its calls to the two engines in turn."""
    router = start_router("router in turn", engines, "--policy=rr+fcfs")
    yield router
    router.stop()


@pytest.mark.parametrize("path", ASKED)
def test_each_engine_answers_in_its_own_form(in_turn: Router, engines: tuple[Engine, ...], path: str) -> None:
    """Of two equal calls each engine gets one, whole or streamed, and its answer is that of a direct call."""
    body = ASKED[path]
    by_id = {str(in_turn.worker(engine)["id"]): engine for engine in engines}
    for engine in engines:
        assert call(engine.url, path, body).status == 200  # so that each finds the prompt in its cache
    whole, streams = ([call(in_turn.url, path, {**body, "stream": each}) for _ in engines] for each in (False, True))
    assert {worker(answer) for answer in whole} == {worker(answer) for answer in streams} == set(by_id)
    for answer in whole:
        direct = call(by_id[worker(answer)].url, path, body)
        assert without(answer.json, "id", "created") == without(direct.json, "id", "created")
    for answer in streams:
        direct = call(by_id[worker(answer)].url, path, {**body, "stream": True})
        assert joined(answer.events()) == joined(direct.events())


@pytest.mark.parametrize("which", [0, 1], ids=["vllm", "sglang"])
def test_either_engine_continues_the_streams_of_the_other(
    in_turn: Router, engines: tuple[Engine, ...], which: int
) -> None:
    """When one engine is killed, each of its streams has one role, one end and the usage of an undisturbed run."""
    undisturbed, killed = streams(in_turn), streams(in_turn)
    run_all(undisturbed)
    victim = engines[which]
    name = in_turn.worker(victim)["id"]
    run_all(killed, victim)
    pairs = [
        (after.path, before.said, after.said)
        for (_, before), (_, after) in zip(undisturbed, killed, strict=True)
        if after.worker == name
    ]
    assert len(pairs) == ON_THE_VICTIM
    assert [after[1:] for _, _, after in pairs] == [before[1:] for _, before, _ in pairs]
    exact = {path: [after == before for of, before, after in pairs if of == path] for path in ASKED}
    print(json.dumps({"killed": victim.dialect, "exact": exact, "tokens": TOKENS}))
    in_turn.wait_settled()


def streams(router: Router) -> list[tuple[Router, Stream]]:
    """Return chats and completions alternately."""
    pairs = zip(chats(ON_THE_VICTIM), texts(ON_THE_VICTIM), strict=True)
    return [(router, stream) for pair in pairs for stream in pair]
