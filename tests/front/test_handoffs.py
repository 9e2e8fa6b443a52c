"""A request whose prompt one engine computes and whose answer another one: the calls to both, and what may go wrong."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest

from tests.support.running import CHAT, COMPLETIONS, RunningRouter, chat, emulated_workers, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, either, scripted_engine, usage
from tests.upstream.test_continued_streams import CARD, PROMPT, begin, content_of, events, final, piece

LONG = "a long text of many words " * 40
PARAMS = b'{"do_remote_prefill": true,"remote_block_ids":[[1,2]], "remote_request_id":"cmpl-\\u00e9","float":1.50}'
"""Spelled in a way that is lost if anyone parses and writes it again."""
EMPTY = b'{"choices":[],"usage":{"prompt_tokens":10}%b}'


class Tiers(NamedTuple):
    """Scripted engines, and the router before them."""

    prefill: Sequence[ScriptedEngine]
    decode: Sequence[ScriptedEngine]
    router: RunningRouter


@asynccontextmanager
async def tiers(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Tiers]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(prefill + decode)]
        for engine in engines:
            engine.poll_answers["/v1/models"] = (200, json.dumps({"object": "list", "data": [CARD]}).encode())
        first, second = engines[:prefill], engines[prefill:]
        urls = {"prefill": [each.url for each in first], "decode": [each.url for each in second]}
        router = await stack.enter_async_context(running_router(**urls, **settings))
        yield Tiers(first, second, router)


async def keep(call: Call, params: bytes = PARAMS, prompt: int = 10, cached: int = 4) -> None:
    """Answer as a prefill worker."""
    counts = json.dumps(usage(prompt, 1, cached)).encode()
    choice = b'{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}'
    await call.respond(200, b'{"choices":[%b],"usage":%b,"kv_transfer_params":%b}' % (choice, counts, params))


def is_release(call: Call) -> bool:
    return call.path == COMPLETIONS and call.json["model"] == "d2lpm: release"


# The two calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_kept_by_one_worker_and_decoded_by_another(stream: bool) -> None:
    """The prefill worker is asked for one token, and the decode worker gets its parameters byte for byte."""
    body = chat(max_tokens=20, min_tokens=3, temperature=0.5, stream=stream)
    async with tiers() as ((prefill,), (decode,), router), router.post(body) as post:
        first = await prefill.call()
        assert first.path == CHAT
        sent = first.json
        assert sent.pop("kv_transfer_params") == {"do_remote_decode": True, "do_remote_prefill": False}
        assert sent == {**chat(temperature=0.5), "stream": False, "max_tokens": 1}
        await keep(first)
        second = await decode.call()
        assert b'"kv_transfer_params":' + PARAMS in second.body
        assert {**second.json, **body} == second.json
        await second.answer("the answer", prompt=10, completion=3)
        response = await post.response()
        assert response.headers["x-d2lpm-worker"] == decode.url.removeprefix("http://")
        assert response.headers["x-d2lpm-prefill-worker"] == prefill.url.removeprefix("http://")
        assert b"the answer" in await post.read()
        await router.until_all_ended()
        (client,) = (await router.fairness())["clients"].values()
    assert client["service"]["extend"] == 6
    assert client["service"]["cached"] == 4
    assert client["service"]["output"] == 3


async def test_either_limit_of_a_chat_becomes_one() -> None:
    """Whichever name the client used is overwritten, as engines differ in which one counts."""
    async with (
        tiers() as ((prefill,), (decode,), router),
        router.post(chat(max_completion_tokens=20, n=1)) as post,
    ):
        first = await prefill.call()
        assert (first.json["max_completion_tokens"], first.json["max_tokens"]) == (1, 1)
        await keep(first)
        await (await decode.call()).answer()
        await post.read()


async def test_a_completion_is_prefilled_for_one_token_whatever_its_limit_is_called() -> None:
    """Engines ignore a chat's name for the limit there, and would compute more than the prompt."""
    body = {"model": "m", "prompt": "one", "max_completion_tokens": 20, "stop": "x", "stop_token_ids": [1]}
    async with tiers() as ((prefill,), (decode,), router), router.post(body, COMPLETIONS) as post:
        first = await prefill.call()
        assert first.json["max_tokens"] == 1
        assert not {"stop", "stop_token_ids"} & first.json.keys()
        await keep(first)
        second = await decode.call()
        assert {**second.json, **body} == second.json
        await second.answer()
        await post.read()


async def test_clients_that_leave_during_their_prefill_hold_nothing() -> None:
    """However many have left, the next body finds room in the byte budget."""
    body = chat("x" * 200_000, stream=True)
    async with tiers(max_held_bytes=1 << 20) as ((prefill,), (decode,), router):
        for _ in range(8):
            async with router.post(body):
                call = await prefill.call()
            await call.wait_closed()
        async with router.post(body) as post:
            await keep(await prefill.call())
            await (await decode.call()).answer()
            assert (await post.response()).status == 200


async def test_a_prefill_worker_is_not_to_blame_for_memory_that_is_full() -> None:
    """Its answer is read to the end, though the client's other calls leave no room for it."""
    body, params = chat("x" * 200_000, stream=True), b'{"remote_block_ids":[%b]}' % b",".join([b"1"] * 100_000)
    async with (
        tiers(max_held_bytes=1 << 20) as ((prefill,), (decode,), router),
        router.post(body) as one,
        router.post(body) as two,
    ):
        for call in [await prefill.call() for _ in range(2)]:
            await keep(call, params)
        for _ in range(2):
            call = await decode.call()
            assert params in call.body
            await call.answer()
        assert [(await post.response()).status for post in (one, two)] == [200, 200]


async def test_a_client_cannot_steer_a_hand_off() -> None:
    """Its own parameters are dropped from both calls; with `--strict` the call is refused."""
    body = chat(kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"}, bootstrap_room=7)
    async with tiers() as ((prefill,), (decode,), router), router.post(body) as post:
        first = await prefill.call()
        assert first.json["kv_transfer_params"]["do_remote_decode"] is True
        assert "bootstrap_room" not in first.json
        await keep(first)
        second = await decode.call()
        assert second.body.count(b"kv_transfer_params") == 1
        assert b"evil" not in second.body
        assert b"bootstrap_room" not in second.body
        await second.answer()
        await post.read()
    async with tiers(strict=True) as (_, _, router), router.post(body) as post:
        assert (await post.response()).status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(n=2)),
        (CHAT, chat(prompt_logprobs=1)),
        (COMPLETIONS, {"model": "m", "prompt": ["one", "two"]}),
        (COMPLETIONS, {"model": "m", "prompt": "one", "echo": True}),
        (COMPLETIONS, {"model": "m", "prompt": "one", "max_tokens": 0}),
        ("/v1/embeddings", {"model": "m", "input": "one"}),
        ("/v1/score", {"model": "m", "text_1": "one", "text_2": "two"}),
        ("/v1/responses", {"model": "m", "input": "one", "store": False}),
        ("/tokenize", {"model": "m", "prompt": "one"}),
    ],
)
async def test_what_one_engine_must_compute_goes_to_a_decode_worker(path: str, body: dict[str, Any]) -> None:
    """There is one hand-off for one answer, so such a call is decoded alone."""
    async with tiers() as (_, (decode,), router), router.post(body, path) as post:
        call = await decode.call()
        assert b"kv_transfer_params" not in call.body
        await call.answer()
        assert (await post.response()).status == 200


async def test_a_client_gets_heartbeats_while_its_prompt_is_computed() -> None:
    """A proxy before the router must not cut the stream."""
    async with (
        tiers(heartbeat=0.02) as ((prefill,), (decode,), router),
        router.post(chat(stream=True)) as post,
    ):
        first = await prefill.call()
        content = (await post.response()).content
        assert await content.readuntil(b"\n\n") == b"\n\n"
        await keep(first)
        await (await decode.call()).answer()
        assert b"yes" in await content.read()


async def test_an_answer_is_that_of_one_engine() -> None:
    """The decode engine finds what the prefill engine has computed, and its text and usage are those of one engine."""
    body = chat(LONG, max_tokens=24, temperature=0)
    with (
        emulated_workers(1) as alone,
        emulated_workers(1, "--role", "prefill") as prefill,
        emulated_workers(1, "--role", "decode") as decode,
    ):
        async with running_router(*alone) as router, router.post(body) as post:
            expected = json.loads(await post.read())
        async with running_router(prefill=prefill, decode=decode) as router:
            async with router.post(body) as post:
                answer = json.loads(await post.read())
            async with router.post({**body, "stream": True}) as post:
                streamed = events(await post.read())
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert content_of(streamed) == expected["choices"][0]["message"]["content"]


# What goes wrong at the prefill worker


@pytest.mark.parametrize(
    "answer", [EMPTY % b"", EMPTY % b',"kv_transfer_params":7', EMPTY % b',"kv_transfer_params":{}', b"no JSON"]
)
async def test_an_answer_without_parameters_is_a_failure(answer: bytes) -> None:
    """Another prefill worker is asked, and the client sees nothing of it."""
    async with tiers(prefill=2) as (prefill, (decode,), router), router.post(chat()) as post:
        call, number = await either(prefill)
        await call.respond(200, answer)
        await keep(await prefill[1 - number].call())
        await (await decode.call()).answer()
        assert (await post.response()).status == 200


async def test_a_prefill_worker_that_dies_is_replaced() -> None:
    """What the first one computed is of no use, and nobody pays for it."""
    async with tiers(prefill=2) as (prefill, (decode,), router), router.post(chat()) as post:
        call, number = await either(prefill)
        call.reset()
        await keep(await prefill[1 - number].call())
        await (await decode.call()).answer()
        assert (await post.response()).status == 200


async def test_a_decode_worker_answers_alone_without_a_living_prefill_worker() -> None:
    """It computes the prompt itself."""
    async with tiers() as ((prefill,), (decode,), router):
        await prefill.stop()
        async with router.post(chat()) as post:
            call = await decode.call()
            assert b"kv_transfer_params" not in call.body
            await call.answer()
            assert (await post.response()).status == 200


async def test_nobody_answers_alone_if_that_is_not_allowed() -> None:
    """With `--pd-fallback no` the call is refused."""
    async with tiers(pd_fallback=False) as ((prefill,), _, router):
        await prefill.stop()
        async with router.post(chat()) as post:
            assert (await post.response()).status == 503


async def test_a_prefill_workers_refusal_is_the_clients_error() -> None:
    """As with one engine; no decode worker hears of it."""
    async with tiers() as ((prefill,), (decode,), router), router.post(chat(stream=True)) as post:
        await (await prefill.call()).respond(400, b'{"error":{"message":"too long","code":400}}')
        response = await post.response()
        assert response.status == 400
        assert b"too long" in await post.read()
        assert decode.calls.empty()


# What goes wrong at the decode worker


@pytest.mark.parametrize("status", [500, 503])
async def test_a_hand_off_that_was_refused_is_prefilled_again(status: int) -> None:
    """The refusal has made the prefill worker let go of it, so the same parameters are never sent twice."""
    async with tiers(decode=2) as ((prefill,), decode, router), router.post(chat()) as post:
        await keep(await prefill.call())
        call, number = await either(decode)
        await call.respond(status, b'{"error":{"message":"no","code":%d}}' % status)
        await keep(await prefill.call(), b'{"again":true}')
        other = await decode[1 - number].call()
        assert other.json["kv_transfer_params"] == {"again": True}
        await other.answer()
        assert (await post.response()).status == 200


async def test_a_hand_off_is_not_sent_again_when_its_connection_closes() -> None:
    """Other calls are, if a used connection closes at once; but the worker may have fetched the prompt before."""
    async with tiers(decode=2) as ((prefill,), decode, router):
        for _ in range(4):  # so that there are connections to be used again
            async with router.post(chat()) as post:
                await keep(await prefill.call())
                await (await either(decode))[0].answer()
                await post.read()
        async with router.post(chat()) as post:
            await keep(await prefill.call())
            call, number = await either(decode)
            call.reset()
            await keep(await prefill.call(), b'{"again":true}')
            other = await decode[1 - number].call()
            assert other.json["kv_transfer_params"] == {"again": True}
            await other.answer()
            assert (await post.response()).status == 200


async def test_a_decode_worker_that_refuses_a_field_computes_the_prompt_itself() -> None:
    """The second call, without that field, has no parameters: the refusal has used them up."""
    async with tiers() as ((prefill,), (decode,), router), router.post(chat(stream=True)) as post:
        await keep(await prefill.call())
        await (await decode.call()).respond(400, b'{"error":{"message":"return_token_ids: no such field"}}')
        again = await decode.call()
        assert "return_token_ids" not in again.json
        assert "kv_transfer_params" not in again.json
        await again.answer()
        assert b"yes" in await post.read()


async def test_a_stream_whose_decode_worker_dies_goes_on_through_another_prefill() -> None:
    """Prompt and answer so far are prefilled, and another decode worker continues the client's stream."""
    async with tiers(decode=2) as ((prefill,), decode, router), router.post(chat(stream=True)) as post:
        await keep(await prefill.call())
        call, number = await either(decode)
        decode[number].calls.put_nowait(call)
        call, start = await begin(decode[number], post)
        call.reset()
        first = await prefill.call()
        assert first.path == COMPLETIONS
        assert (first.json["prompt"], first.json["max_tokens"]) == ([*PROMPT, 1, 2], 1)
        await keep(first, b'{"again":true}')
        rest = await decode[1 - number].call()
        assert rest.json["prompt"] == [*PROMPT, 1, 2]
        assert rest.json["kv_transfer_params"] == {"again": True}
        await rest.stream(piece("three", [3], 1, "stop"), final(12, 1), DONE)
        assert content_of(events(start + await post.read())) == "one two three"


async def test_a_decode_worker_that_may_fetch_too_late_gives_no_answer() -> None:
    """It stands still with its call until the prompt is too old: the call is closed, and the prompt prefilled again."""
    async with (
        tiers(decode=2, handoff_seconds=1.0, retry_budget=0.0, retry_floor=0) as ((prefill,), decode, router),
        router.post(chat()) as post,
    ):
        await keep(await prefill.call(), b'{"number":1}')
        still, number = await either(decode)
        decode[number].ignores_polls = True
        again = await prefill.call()
        await still.wait_closed()
        await keep(again, b'{"number":2}')
        call = await decode[1 - number].call()
        assert call.json["kv_transfer_params"] == {"number": 2}
        await call.answer()
        assert b"yes" in await post.read()
        await router.until_all_ended()
        (client,) = (await router.fairness())["clients"].values()
    assert client["service"]["output"] == 1


async def test_a_decode_worker_that_reads_its_calls_may_take_its_time() -> None:
    """It has no answer when the prompt is too old to be sent, but it gives a sign of life then."""
    async with (
        tiers(handoff_seconds=1.0, poll_interval=3600) as ((prefill,), (decode,), router),
        router.post(chat()) as post,
    ):
        await keep(await prefill.call())
        call = await decode.call()
        decode.polls.clear()
        await until(lambda: [poll.path for poll in decode.polls] == ["/health"])
        await call.answer()
        assert (await post.response()).status == 200
        assert prefill.calls.empty()


async def test_an_old_hand_off_is_released_and_never_decoded() -> None:
    """While no decode worker has room it becomes too old; then it is prefilled again, free for its client."""
    async with tiers(window="fixed", max_inflight=1, handoff_seconds=1.0) as ((prefill,), (decode,), router):
        async with router.post(chat()) as post:
            first = await prefill.call()
            async with router.post(chat(n=2)) as other:
                busy = await decode.call()
                await keep(first, b'{"number":1}')
                release = await decode.call()
                assert is_release(release)
                assert release.json["kv_transfer_params"] == {"number": 1}
                await release.respond(404, b"{}")
                await busy.answer()
                await other.read()
            await keep(await prefill.call(), b'{"number":2}')
            call = await decode.call()
            assert call.json["kv_transfer_params"] == {"number": 2}
            await call.answer()
            assert (await post.response()).status == 200
        await router.until_all_ended()
        (client,) = (await router.fairness())["clients"].values()
        assert client["service"]["extend"] <= 6 + 10


# A client that leaves


async def test_a_client_that_leaves_during_the_prefill_ends_it() -> None:
    """The connection to the prefill worker is closed."""
    async with tiers() as ((prefill,), (decode,), router):
        async with router.post(chat()) as _:
            call = await prefill.call()
        await call.wait_closed()
        await router.until_all_ended()
        assert decode.calls.empty()


async def test_what_is_kept_for_a_client_that_leaves_is_released() -> None:
    """Any decode worker refuses a call with the parameters, which tells the prefill worker."""
    async with tiers(window="fixed", max_inflight=1) as ((prefill,), (decode,), router), AsyncExitStack() as other:
        async with router.post(chat()) as _:
            first = await prefill.call()
            answer = await other.enter_async_context(router.post(chat(n=2)))
            busy = await decode.call()
            await keep(first)
            await until(lambda: len(router.scheduler.handoffs) == 1)
        release = await decode.call()
        assert is_release(release)
        assert b'"kv_transfer_params":' + PARAMS in release.body
        await release.respond(404, b"{}")
        await busy.answer()
        await answer.read()


async def test_a_client_that_leaves_while_decoding_ends_that() -> None:
    """The connection to the decode worker is closed, and nothing is released twice."""
    async with tiers() as ((prefill,), (decode,), router):
        async with router.post(chat(stream=True)) as post:
            await keep(await prefill.call())
            call = await decode.call()
            await call.begin()
            await call.write(chunk("one"))
            await (await post.response()).content.readuntil(b"one")
        await call.wait_closed()
        await router.until_all_ended()
        assert decode.calls.empty()
