"""Calls that crash an engine: known ones reach no engine, and others are not retried at every worker."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from router.api.body.fields import largest_id
from router.core.fleet.health import DEFAULT_RULES
from router.core.model.events import Event, WorkerJoined
from router.core.model.request import WorkerId
from router.errors import BadRequest
from router.upstream.dialects import read_vocabulary
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.polling.poll_client import PollClient
from router.upstream.polling.probe import WorkerProbe
from router.upstream.ranks.rank_rules import RankRules
from tests.support.running import CHAT, COMPLETIONS, chat, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

SGLANG_MODELS = json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]}).encode()
REFUSAL = b'{"object":"error","message":"logit_bias must has keys in [0, 511], got -1.","type":"BadRequest","code":400}'
OUTSIDE: list[tuple[str, dict[str, object]]] = [
    (COMPLETIONS, {"prompt": [999_999_999]}),
    (COMPLETIONS, {"prompt": [[1], [2, 512]]}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"512": 1}}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999999": 1}}),
    ("/v1/embeddings", {"input": [512]}),
    ("/v1/score", {"query": [512], "items": [[1]]}),
    ("/v1/nobody/knows", {"input_ids": [[3], [512]]}),
]


def as_sglang(engine: ScriptedEngine, *, embeds: bool = False) -> None:
    """Let the engine answer polls like an SGLang with a vocabulary of 512 tokens."""
    engine.poll_answers |= {
        "/v1/models": (200, SGLANG_MODELS),
        "/ready": (200, b""),
        "/v1/loads": (404, b""),
        "/server_info": (200, json.dumps({"version": "0.5.23", "is_embedding": embeds}).encode()),
        COMPLETIONS: (400, REFUSAL),
    }


@pytest.mark.parametrize(("path", "body"), OUTSIDE)
async def test_a_token_id_outside_the_vocabulary_reaches_no_engine(path: str, body: dict[str, object]) -> None:
    """The size is known from the refusal of an SGLang, which names it."""
    async with scripted_engine() as engine:
        as_sglang(engine)
        async with running_router(engine.url) as router:
            probes = len([poll for poll in engine.polls if poll.path == COMPLETIONS])
            async with router.post({"model": "m", **body}, path) as post:
                assert (await post.response()).status == 400
                assert b"below 512" in await post.read()
            assert len([poll for poll in engine.polls if poll.path == COMPLETIONS]) == probes == 1
            assert engine.calls.empty()


async def test_a_worker_is_healthy_only_once_it_has_joined() -> None:
    """It joins only after the probe for its vocabulary is answered."""
    async with scripted_engine() as engine, PollClient() as client:
        as_sglang(engine)
        engine.forwards_vocabulary_probes = True
        endpoint, events = WorkerEndpoint(WorkerId("w"), engine.url), list[Event]()
        polling = asyncio.create_task(
            WorkerProbe(endpoint, events.append, WorkerDirectory([endpoint]), RankRules()).poll_health(client)
        )
        probe = await engine.call()
        assert (endpoint.healthy, events) == (False, [])
        await probe.respond(400, REFUSAL)
        await polling
        assert (endpoint.healthy, endpoint.vocabulary) == (True, 512)
        assert isinstance(events[0], WorkerJoined)


@pytest.mark.parametrize(
    "fields", [{"prompt": [-1]}, {"input": [[1], [-7]]}, {"logit_bias": {"-1": 1}}, {"logit_bias": {" -2": 1}}]
)
def test_a_negative_id_is_always_refused(fields: dict[str, object]) -> None:
    """It is refused whether or not the vocabulary is known."""
    with pytest.raises(BadRequest):
        largest_id(fields)


def test_the_largest_id_is_found_anywhere() -> None:
    """Strings, and lists of anything else, have none."""
    assert largest_id({"prompt": [[1, 9], [3]], "logit_bias": {"7": 1, "x": 2}}) == 9
    assert largest_id({"prompt": "a", "input": ["b"], "documents": [{"text": "c"}], "query": [True]}) == -1
    assert largest_id({"logit_bias": {"11": 1}, "items": [4]}) == 11


def test_the_vocabulary_size_is_read_only_from_a_refusal() -> None:
    """The words of another engine give no size."""
    assert read_vocabulary(REFUSAL) == 512
    assert read_vocabulary(b'{"error":{"message":"token_id(s) [-1] in logit_bias contain out-of-vocab ids"}}') is None


async def test_no_chat_is_sent_to_an_embedding_worker() -> None:
    """The worker would crash: another one of the model gets the chat, or the client gets 400; no worker is blamed."""
    async with scripted_engine() as embedding, scripted_engine() as writing:
        as_sglang(embedding, embeds=True)
        async with running_router(embedding.url, writing.url, policy="rr+fcfs") as router:
            for _ in range(4):
                async with router.post(chat()) as post:
                    await (await writing.call()).answer()
                    assert (await post.response()).status == 200
        assert embedding.calls.empty()
        async with running_router(embedding.url) as router:
            async with router.post(chat()) as post:
                assert (await post.response()).status == 400
                assert b"only makes embeddings" in await post.read()
            async with router.post({"model": "m", "input": "x"}, "/v1/embeddings") as post:
                await (await embedding.call()).respond(200, b'{"data":[]}')
                assert (await post.response()).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_kills_its_workers_is_given_up(stream: bool) -> None:
    """As many workers died with it as the number of tries; the others live."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(DEFAULT_RULES.tries + 2)]
        router = await stack.enter_async_context(
            running_router(*(each.url for each in engines), retry_budget=0, retry_floor=100)
        )
        async with router.post(chat(stream=stream)) as post:
            for _ in range(DEFAULT_RULES.tries):
                await until(lambda: any(not each.calls.empty() for each in engines))
                (victim,) = [each for each in engines if not each.calls.empty()]
                await victim.call()
                await victim.stop()
            response = await post.response()
            assert response.status == 502
            assert "worker_unreachable" in (await post.read()).decode()
        assert all(each.calls.empty() for each in engines)
