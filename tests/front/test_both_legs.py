"""A request that its prefill and its decode worker need at once: both calls, and what may go wrong with either."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
import pytest

from router.api.handoff.legs import Rendezvous
from router.upstream.connections import ConnectedWorker
from tests.support.running import CHAT, COMPLETIONS, TIMEOUT_S, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, either, scripted_engine, usage
from tests.support.workers_http import eventually, series, worker, worker_server
from tests.upstream.test_continued_streams import CARD, PROMPT, begin, content_of, events, final, piece
from workers.server.clock import EmulatedClock
from workers.server.process import WorkerServer

LONG = "a long text of many words " * 40
ABORT: Final = "/abort_request"
LOADS: Final = json.dumps({"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]}).encode()
BOTH: Final = pytest.mark.parametrize("connector", ["sglang", "mooncake"])
"""In the same way with either connector."""
FAILED: Final = b'{"error":{"message":"no","code":%d}}'
SOON: Final = 1.0
"""A timeout in seconds: long compared with the stalls of a busy machine, in which an answer cannot pass either."""


class Legs(NamedTuple):
    """Scripted engines that must be called at once, and the router before them."""

    prefill: Sequence[ScriptedEngine]
    decode: Sequence[ScriptedEngine]
    router: RunningRouter


class Pair(NamedTuple):
    """The two calls of one request, and which engines have them."""

    prefill: Call
    decode: Call
    numbers: tuple[int, int]


@asynccontextmanager
async def legs(connector: str = "sglang", prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Legs]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(prefill + decode)]
        first, second = engines[:prefill], engines[prefill:]
        for engine in engines:
            owner = {"mooncake": "vllm"}.get(connector, connector)
            engine.poll_answers["/v1/models"] = (200, json.dumps({"data": [{**CARD, "owned_by": owner}]}).encode())
            if connector == "sglang":
                mode = {"disaggregation_mode": "prefill" if engine in first else "decode", "version": "0.5.23"}
                info = json.dumps({**mode, "disaggregation_bootstrap_port": 9001}).encode()
                engine.poll_answers |= {"/ready": (200, b""), "/v1/loads": (200, LOADS), "/server_info": (200, info)}
                engine.poll_answers[ABORT] = (200, b"")
            else:
                engine.poll_answers["/query"] = (200, b'{"0":{"engine_id":"engine of %d"}}' % engine.port)
        if connector == "mooncake":
            prefillers = [{"url": each.url, "bootstrap_port": each.port} for each in first]
            settings |= {"prefill": prefillers, "decode": [each.url for each in second], "connector": "mooncake"}
            engines = []
        router = await stack.enter_async_context(running_router(*(each.url for each in engines), **settings))
        yield Legs(first, second, router)


async def both(fleet: Legs) -> Pair:
    """Wait until both engines have a request that neither has answered."""
    (prefill, first), (decode, second) = await asyncio.gather(either(fleet.prefill), either(fleet.decode))
    return Pair(prefill, decode, (first, second))


def room_of(call: Call) -> object:
    """Return what no two requests have in common."""
    params = call.json.get("kv_transfer_params")
    return call.json["bootstrap_room"] if params is None else params["transfer_id"]


async def prefilled(call: Call, finish: str = "length", prompt: int = 10, cached: int = 4) -> None:
    """Answer as a prefill worker."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": finish}
    await call.respond(200, json.dumps({"choices": [choice], "usage": usage(prompt, 1, cached)}).encode())


async def aborted(engine: ScriptedEngine, call: Call) -> None:
    """Wait until a call is aborted: its connection is closed, and an SGLang was told so."""
    await call.wait_closed()
    if (rid := call.json.get("rid")) is not None:
        await until(lambda: rid in [poll.json["rid"] for poll in engine.polls if poll.path == ABORT])


# The two calls


@pytest.mark.parametrize("stream", [False, True])
async def test_both_sglang_servers_get_the_call_at_once(stream: bool) -> None:
    """Neither has answered when the other has it; they meet in one room, and only the decode server's is streamed."""
    body = chat(max_tokens=20, temperature=0.5, stream=stream)
    async with legs() as fleet, fleet.router.post(body) as post:
        pair = await both(fleet)
        first, second = pair.prefill.json, pair.decode.json
        meeting = {name: second[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")}
        assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("127.0.0.1", 9001)
        assert 0 <= meeting["bootstrap_room"] < 2**63
        assert first == {**body, **meeting, "stream": False}
        assert {**second, **body} == second
        await prefilled(pair.prefill)
        await until(lambda: not fleet.router.scheduler.prefills)
        await pair.decode.answer("the answer", prompt=10, completion=3)
        response = await post.response()
        (prefill,), (decode,), router = fleet
        assert response.headers["x-d2lpm-worker"] == decode.url.removeprefix("http://")
        assert response.headers["x-d2lpm-prefill-worker"] == prefill.url.removeprefix("http://")
        assert b"the answer" in await post.read()
        await router.until_all_ended()
        (client,) = (await router.fairness())["clients"].values()
    assert client["service"] | {"cost": 0} == {"extend": 6, "cached": 4, "output": 3, "cost": 0}


async def test_both_vllm_servers_with_mooncake_get_the_call_at_once() -> None:
    """They share a transfer id; the decode server is told which engine it is to ask, and where."""
    body = chat(max_tokens=20, min_tokens=3, stream=True)
    async with legs("mooncake") as fleet, fleet.router.post(body) as post:
        pair = await both(fleet)
        (prefill,), _, _ = fleet
        transfer = room_of(pair.prefill)
        expected = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        assert pair.prefill.json["kv_transfer_params"] == expected
        assert {name: pair.prefill.json[name] for name in ("stream", "max_tokens", "ignore_eos")} == {
            "stream": False,
            "max_tokens": 1,
            "ignore_eos": True,
        }
        assert "min_tokens" not in pair.prefill.json
        assert pair.decode.json["kv_transfer_params"] == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": f"engine of {prefill.port}",
            "remote_bootstrap_addr": prefill.url,
        }
        await prefilled(pair.prefill)
        await pair.decode.answer("the answer")
        assert b"the answer" in await post.read()


@BOTH
async def test_no_two_requests_meet_in_the_same_place(connector: str) -> None:
    """Engines do not tell two requests in one room apart; a retry is another request to them."""
    async with legs(connector, prefill=2) as fleet, fleet.router.post(chat("one")) as one:
        pairs = [await both(fleet)]
        async with fleet.router.post(chat("two")) as two:
            pairs.append(await both(fleet))
            await pairs[0].prefill.respond(500, FAILED % 500)
            pairs.append(await both(fleet))
            assert len({room_of(pair.prefill) for pair in pairs}) == 3
            assert all(room_of(pair.prefill) == room_of(pair.decode) for pair in pairs)
            for pair in pairs[1:]:
                await prefilled(pair.prefill)
                await pair.decode.answer()
            assert {(await each.response()).status for each in (one, two)} == {200}


@BOTH
async def test_a_client_cannot_choose_where_its_calls_meet(connector: str) -> None:
    """What it says of rooms, ranks and ids is dropped, or refused with `--strict`."""
    steering: dict[str, Any] = {
        "bootstrap_host": "evil",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
        "disagg_prefill_dp_rank": 3,
        "routed_dp_rank": 3,
        "data_parallel_rank": 3,
        "kv_transfer_params": {"transfer_id": "evil"},
        "ec_transfer_params": {"evil": 1},
        "vllm_xargs": {"kv_transfer_params": "evil"},
    }
    async with legs(connector) as fleet, fleet.router.post(chat(rid="evil", **steering)) as post:
        pair = await both(fleet)
        for call in (pair.prefill, pair.decode):
            assert call.json.get("bootstrap_room") != 7
            assert not {"disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"} & call.json.keys()
            if connector == "sglang":
                assert b"evil" not in call.body
        await prefilled(pair.prefill)
        await pair.decode.answer()
        assert (await post.response()).status == 200
    async with legs(connector, strict=True) as fleet:
        for name, value in steering.items():
            async with fleet.router.post(chat(**{name: value})) as post:
                assert (await post.response()).status == 400, name


async def test_several_answers_of_one_call_go_to_both_sglang_servers() -> None:
    """A decode server computes nothing alone; the call's rooms are consecutive."""
    async with legs() as fleet, fleet.router.post(chat(n=2)) as post:
        pair = await both(fleet)
        assert pair.decode.json["n"] == 2
        await prefilled(pair.prefill)
        await pair.decode.answer()
        assert (await post.response()).status == 200


async def test_what_no_room_can_be_named_for_is_refused_by_sglang_servers() -> None:
    """Neither half can serve it alone, and nothing hangs."""
    async with legs() as fleet, fleet.router.post({"model": "m", "input": "one"}, "/v1/embeddings") as post:
        assert (await post.response()).status == 503


async def test_several_answers_are_decoded_alone_with_mooncake() -> None:
    """A vLLM decode server can compute prompts, and a hand-off serves one answer."""
    async with legs("mooncake") as ((prefill,), (decode,), router), router.post(chat(n=2)) as post:
        call = await decode.call()
        assert b"kv_transfer_params" not in call.body
        await call.answer()
        assert (await post.response()).status == 200
        assert prefill.calls.empty()


@BOTH
async def test_a_client_gets_heartbeats_until_the_first_token(connector: str) -> None:
    """Both engines are silent until the prompt is computed; a proxy must not cut the stream."""
    async with legs(connector, heartbeat=0.02) as fleet, fleet.router.post(chat(stream=True)) as post:
        pair = await both(fleet)
        content = (await post.response()).content
        assert await content.readuntil(b"\n\n") == b"\n\n"
        await prefilled(pair.prefill)
        await pair.decode.answer()
        assert b"yes" in await content.read()


@BOTH
async def test_a_prefill_workers_answer_is_read_to_its_end(connector: str) -> None:
    """Even if the decode worker has long answered: closing its connection would abort the transfer."""
    async with legs(connector) as fleet, fleet.router.post(chat()) as post:
        pair = await both(fleet)
        await pair.prefill.begin(200, "application/json")
        await pair.decode.answer()
        assert (await post.response()).status == 200
        await until(lambda: fleet.router.loose_ends.open == 1 and not fleet.router.scheduler.live)
        await pair.prefill.write(b'{"choices":[{"finish_reason":"length"}],"filler":"%b"' % (b"x" * 2**18))
        assert not pair.prefill.connection.closed.is_set()
        await pair.prefill.write(b"}")
        await pair.prefill.end()
        await until(lambda: not fleet.router.loose_ends.open)
        async with fleet.router.post(chat("again")) as again:
            second = await both(fleet)
            assert second.prefill.connection is pair.prefill.connection, "it was kept for the next call"
            await prefilled(second.prefill)
            await second.decode.answer()
            assert (await again.response()).status == 200


# What goes wrong


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["500", "503", "reset", "abort", "odd"])
async def test_a_prefill_that_fails_frees_its_decode_worker(connector: str, stream: bool, how: str) -> None:
    """The decode worker's call is aborted at once, and both are sent again; the client sees nothing of it."""
    async with legs(connector, prefill=2) as fleet, fleet.router.post(chat(stream=stream)) as post:
        pair = await both(fleet)
        match how:
            case "reset":
                pair.prefill.reset()
            case "abort":
                await prefilled(pair.prefill, "abort")
            case "odd":
                await pair.prefill.respond(200, b"no JSON")
            case _:
                await pair.prefill.respond(int(how), FAILED % int(how))
        await aborted(fleet.decode[0], pair.decode)
        again = await both(fleet)
        assert again.numbers[0] != pair.numbers[0] or how == "503"
        await prefilled(again.prefill)
        await again.decode.answer()
        assert b"yes" in await post.read()
        await fleet.router.until_all_ended()
        (client,) = (await fleet.router.fairness())["clients"].values()
    assert client["service"]["output"] == 1


@BOTH
@pytest.mark.parametrize("how", ["500", "503", "reset"])
async def test_a_decode_worker_that_fails_frees_its_prefill_worker(connector: str, how: str) -> None:
    """The prefill worker's call is aborted at once, and both are sent again."""
    async with legs(connector, decode=2) as fleet, fleet.router.post(chat(stream=True)) as post:
        pair = await both(fleet)
        if how == "reset":
            pair.decode.reset()
        else:
            await pair.decode.respond(int(how), FAILED % int(how))
        await aborted(fleet.prefill[0], pair.prefill)
        again = await both(fleet)
        assert again.numbers[1] != pair.numbers[1]
        await prefilled(again.prefill)
        await again.decode.answer()
        assert b"yes" in await post.read()


@BOTH
async def test_a_prefill_worker_is_not_blamed_for_a_decode_worker_that_stands_still(connector: str) -> None:
    """It waits for the decode worker, too, and its time is over first. The other decode worker gets the call."""
    settings: dict[str, Any] = {"first_token_timeout": SOON, "poll_interval": 30}
    async with legs(connector, decode=2, **settings) as fleet, fleet.router.post(chat()) as post:
        pair = await both(fleet)
        fleet.decode[pair.numbers[1]].ignores_polls = True
        again = await both(fleet)
        assert again.numbers[1] != pair.numbers[1]
        await prefilled(again.prefill)
        await again.decode.answer()
        assert (await post.response()).status == 200


@BOTH
async def test_a_refusal_is_the_clients_error_whichever_worker_says_it(connector: str) -> None:
    """As with one engine; the other worker is freed, and nothing is tried again."""
    for leg in ("prefill", "decode"):
        async with legs(connector) as fleet, fleet.router.post(chat()) as post:
            pair = await both(fleet)
            refusing, waiting = (pair.prefill, pair.decode) if leg == "prefill" else (pair.decode, pair.prefill)
            await refusing.respond(400, b'{"error":{"message":"too long","code":400}}')
            assert (await post.response()).status == 400
            assert b"too long" in await post.read()
            await aborted((fleet.decode if leg == "prefill" else fleet.prefill)[0], waiting)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_an_answer_without_a_token_is_believed_only_after_the_prefill(
    connector: str, stream: bool, fails: bool
) -> None:
    """A decode worker may answer so because the prefill worker has failed, and that may be known a little later."""
    async with legs(connector, prefill=2, decode=2) as fleet, fleet.router.post(chat(stream=stream)) as post:
        pair = await both(fleet)
        if not fails:
            await prefilled(pair.prefill)
            await until(lambda: not fleet.router.scheduler.prefills)
        if stream:
            await pair.decode.stream(chunk(""), chunk("", "length"), DONE)
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}
            body = {"choices": [choice], "usage": usage(10, 0)}
            await pair.decode.respond(200, json.dumps(body).encode())
        if fails:
            await pair.prefill.respond(500, FAILED % 500)
            again = await both(fleet)
            await prefilled(again.prefill)
            await again.decode.answer()
            assert b"yes" in await post.read()
        else:
            answer = await post.read()
            assert b'"length"' in answer
            assert b"yes" not in answer


@BOTH
async def test_a_prefill_worker_that_dies_after_the_first_token_changes_nothing(connector: str) -> None:
    """The decode worker has all that it needs."""
    async with legs(connector) as fleet, fleet.router.post(chat(stream=True)) as post:
        pair = await both(fleet)
        await pair.decode.begin()
        await pair.decode.write(chunk("on"))
        content = (await post.response()).content
        await content.readuntil(b"\n\n")
        pair.prefill.reset()
        await pair.decode.write(chunk("ly", "stop"))
        await pair.decode.write(DONE)
        await pair.decode.end()
        assert b"ly" in await content.read()


@BOTH
async def test_an_answer_that_is_being_sent_needs_the_prefill_worker_no_more(connector: str) -> None:
    """A client that reads a long answer slowly gets all of it, though the prefill worker dies meanwhile."""
    async with legs(connector) as fleet, fleet.router.post(chat()) as post:
        pair = await both(fleet)
        choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 2**24}, "finish_reason": "stop"}
        answer = json.dumps({"choices": [choice], "usage": usage(10, 5)}).encode()
        sending = asyncio.ensure_future(pair.decode.respond(200, answer))
        assert (await post.response()).status == 200
        pair.prefill.reset()
        await asyncio.wait([sending], timeout=0.2)  # it is sent no further than the client reads
        assert await post.read() == answer
        await sending
        await fleet.router.until_all_ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_calls_begin_leaves_nothing(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call may be cancelled in the turn of the event loop in which its two tasks are made."""
    async with legs() as fleet:
        ends, meet = fleet.router.loose_ends, fleet.router.loose_ends.meet

        def meet_and_leave(prefill: ConnectedWorker) -> Rendezvous:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return meet(prefill)

        monkeypatch.setattr(ends, "meet", meet_and_leave)
        async with fleet.router.post(chat(stream=stream)) as post:
            with suppress(aiohttp.ClientError):
                await post.response()
        monkeypatch.undo()
        await fleet.router.until_all_ended()
        await until(lambda: not ends.open)
        async with fleet.router.post(chat("next")) as post:
            pair = await both(fleet)
            assert all(b"next" in call.body for call in (pair.prefill, pair.decode))
            await prefilled(pair.prefill)
            await pair.decode.answer()
            assert (await post.response()).status == 200


async def test_a_stream_whose_decode_worker_dies_goes_on_through_another_prefill() -> None:
    """Prompt and answer so far are sent to a prefill and a decode worker, which continue the client's stream."""
    async with legs("mooncake", decode=2) as fleet, fleet.router.post(chat(stream=True)) as post:
        pair = await both(fleet)
        await prefilled(pair.prefill)
        decode = fleet.decode[pair.numbers[1]]
        decode.calls.put_nowait(pair.decode)
        call, start = await begin(decode, post)
        call.reset()
        again = await both(fleet)
        assert again.prefill.path == again.decode.path == COMPLETIONS
        assert again.prefill.json["prompt"] == again.decode.json["prompt"] == [*PROMPT, 1, 2]
        await prefilled(again.prefill)
        await again.decode.stream(piece("three", [3], 1, "stop"), final(12, 1), DONE)
        assert content_of(events(start + await post.read())) == "one two three"


@BOTH
@pytest.mark.parametrize("state", ["waiting", "prefilled", "streaming"])
async def test_a_client_that_leaves_frees_both_workers(connector: str, state: str) -> None:
    """Whatever they are doing for it."""
    async with legs(connector) as fleet:
        async with fleet.router.post(chat(stream=True)) as post:
            pair = await both(fleet)
            if state != "waiting":
                await prefilled(pair.prefill)
            if state == "streaming":
                await pair.decode.begin()
                await pair.decode.write(chunk("on"))
                await (await post.response()).content.readuntil(b"\n\n")
        await aborted(fleet.decode[0], pair.decode)
        if state == "waiting":
            await aborted(fleet.prefill[0], pair.prefill)
        await fleet.router.until_all_ended()


async def test_a_dead_prefill_worker_is_replaced_and_its_partner_freed() -> None:
    """A refused connection costs nothing, and the client waits for nobody."""
    async with legs(prefill=2, poll_interval=30) as fleet:
        for _ in range(2):
            async with fleet.router.post(chat()) as post:
                pair = await both(fleet)
                await prefilled(pair.prefill)
                await pair.decode.answer()
                await post.read()
        await fleet.prefill[0].stop()
        for text in ("one", "two"):
            async with fleet.router.post(chat(text)) as post:
                while True:
                    call, _ = await either([fleet.prefill[1]])
                    await prefilled(call)
                    break
                decode = await fleet.decode[0].call()
                while decode.json["bootstrap_room"] != call.json["bootstrap_room"]:
                    await aborted(fleet.decode[0], decode)
                    decode = await fleet.decode[0].call()
                await decode.answer()
                assert (await post.response()).status == 200


# Roles that do not fit


@pytest.mark.one_process("the test reads the router's log")
async def test_the_role_of_an_sglang_server_must_be_the_one_it_was_started_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is named, and sent nothing."""
    async with scripted_engine() as engine:
        engine.poll_answers["/v1/models"] = (200, json.dumps({"data": [{**CARD, "owned_by": "sglang"}]}).encode())
        engine.poll_answers["/server_info"] = (200, b'{"disaggregation_mode":"prefill"}')
        engine.poll_answers |= {"/ready": (200, b""), "/v1/loads": (200, LOADS)}
        async with running_router(decode=[engine.url]) as router, router.post(chat()) as post:
            assert (await post.response()).status == 503
    assert "has the role decode, and is an SGLang with --disaggregation-mode prefill" in caplog.text


@pytest.mark.one_process("the test reads the router's log")
async def test_two_connectors_in_one_model_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """The worker that comes second is not used."""
    async with scripted_engine() as one, scripted_engine() as two:
        one.poll_answers["/query"] = (200, b'{"0":{"engine_id":"e"}}')
        prefill = {"url": one.url, "connector": "mooncake", "bootstrap_port": one.port}
        async with running_router(prefill=[prefill], decode=[two.url]):
            await until(lambda: "and other workers of its model by" in caplog.text)
    assert "has prefill workers and no decode worker" in caplog.text or "and no prefill worker" in caplog.text


# Emulated engines


class Fleet(NamedTuple):
    """Emulated engines, and the router before them."""

    prefill: Sequence[str]
    decode: Sequence[str]
    router: RunningRouter
    http: aiohttp.ClientSession
    servers: Mapping[str, WorkerServer]
    """By URL."""

    def open_calls(self, urls: Sequence[str]) -> int:
        """Return how many calls these engines have, computed or waiting for their other leg."""
        return sum(len(self.servers[url]._app._calls) for url in urls)

    async def is_armed(self, url: str) -> bool:
        """Return whether a fault is still to happen at an engine."""
        async with self.http.get(f"{url}/emulated/faults") as response:
            return bool(await response.json())

    async def arm(self, url: str, **calls: int) -> None:
        """Let the next calls to an engine go wrong."""
        async with self.http.post(f"{url}/emulated/faults", json=calls) as response:
            assert response.status == 200

    async def until_free(self) -> None:
        """Wait until the engines that are alive hold nothing for any request."""
        for url in (*self.prefill, *self.decode):
            await eventually(partial(self._is_free, url))

    async def _is_free(self, url: str) -> bool:
        try:
            async with self.http.get(f"{url}/v1/loads") as response:  # SGLang's metrics are often old
                entries = (await response.json())["loads"] if response.status == 200 else [await series(self.http, url)]
        except aiohttp.ClientError:
            return True  # it is dead
        return not any(value for entry in entries for name, value in entry.items() if name in BUSY)


BUSY: Final = frozenset(
    {
        *("num_running_reqs", "num_waiting_reqs", "num_used_tokens"),
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    }
)
"""What an engine reports that has a request, or holds what it has computed for one."""


@asynccontextmanager
async def emulated(connector: str, prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Fleet]:
    """Run emulated engines that exchange KV caches, and the router before them. `settings`: more of the engines'.

    A call that the other one has left waits for five minutes and more.
    """
    dialect: dict[str, Any] = {"dialect": "sglang"} if connector == "sglang" else {"connector": "mooncake"}
    # A prefill call that is cut in the moment in which its prompt is computed leaves it held until this time is over,
    # as with real engines, which wait for five to eight minutes.
    dialect |= {"transfer_timeout": 30.0, "model": "m"} | settings
    with ExitStack() as stack:
        roles = ["prefill"] * prefill + ["decode"] * decode
        servers = [stack.enter_context(worker_server(role=role, **dialect)) for role in roles]
        urls = [server.url for server in servers]
        first, second = urls[:prefill], urls[prefill:]
        async with aiohttp.ClientSession() as http:
            if connector == "sglang":
                given: dict[str, Any] = {"worker": [*first, *second]}
            else:
                given = {"prefill": [], "decode": second, "connector": "mooncake"}
                for url in first:
                    async with http.get(f"{url}/server_info") as response:
                        port = int((await response.json())["vllm_env"]["VLLM_MOONCAKE_BOOTSTRAP_PORT"])
                    given["prefill"].append({"url": url, "bootstrap_port": port})
            async with running_router(*given.pop("worker", ()), **given) as router:
                yield Fleet(first, second, router, http, dict(zip(urls, servers, strict=True)))


@BOTH
async def test_an_answer_is_that_of_one_engine(connector: str) -> None:
    """Text and usage, streamed or not, of chats and completions; what was held for them is released."""
    calls = [(CHAT, chat(LONG, max_tokens=24)), (COMPLETIONS, {"model": "m", "prompt": LONG, "max_tokens": 24})]
    with worker(model="m", dialect="sglang" if connector == "sglang" else "vllm") as alone:
        async with emulated(connector) as fleet, running_router(alone) as single:
            for path, body in calls:
                answers = []
                for router in (single, fleet.router):
                    async with router.post(body, path) as post:
                        answers.append(json.loads(await post.read()))
                    async with router.post({**body, "stream": True}, path) as post:
                        answers.append(content_of(events(await post.read())) if path == CHAT else "")
                expected, streamed, answer, streamed_by_two = answers
                assert answer["choices"] == expected["choices"]
                assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
                assert streamed_by_two == streamed
            await fleet.until_free()


Fault = tuple[str, str]
"""Which worker goes wrong, and how."""
REFUSALS: Final[Sequence[Fault]] = [
    *((leg, fault) for leg in ("prefill", "decode") for fault in ("refuse", "unavailable")),
    ("decode", "empty_length"),
]


@BOTH
@pytest.mark.parametrize(
    "faults",
    [REFUSALS, [("prefill", "die_during")], [("prefill", "die_after")], [("decode", "die_in_stream")]],
    ids=["refusals", "dead prefill", "dead after prefill", "dead decode"],
)
async def test_an_engine_that_fails_costs_no_answer_and_leaves_its_partner_free(
    connector: str, faults: Sequence[Fault]
) -> None:
    """Every client gets the answer of one engine, but for one whose call is refused; nothing is held by anyone."""
    async with emulated(connector, prefill=2, decode=2) as fleet:
        for leg, fault in faults:
            await fleet.arm((fleet.prefill if leg == "prefill" else fleet.decode)[0], **{fault: 1})
            bodies = [chat(f"{number} {LONG}", max_tokens=8, stream=True) for number in range(4)]
            answers = await asyncio.gather(*(answer_to(fleet.router, body) for body in bodies))
            # Asked again, since the four need not visit both workers: the fault may strike one of these.
            again = [await answer_to(fleet.router, body) for body in bodies]
            refused = [status for status, _ in [*answers, *again] if status != 200]
            assert refused == ([400] if fault == "refuse" else [])
            differ = [
                {first, second}
                for (status, first), (status_again, second) in zip(answers, again, strict=True)
                if status == status_again and first != second
            ]
            # An empty answer is believed if the prefill has succeeded, which with Mooncake needs no decode worker.
            believed = fault == "empty_length" and connector == "mooncake"
            assert not differ or (believed and len(differ) == 1 and "" in differ[0])
            await fleet.until_free()
        await until(lambda: not fleet.router.loose_ends.open)


async def answer_to(router: RunningRouter, body: Mapping[str, object]) -> tuple[int, str]:
    """Return the status and the content of a streamed answer."""
    async with router.post(body) as post:
        response = await post.response()
        return response.status, content_of(events(await post.read())) if response.status == 200 else ""


SLOW: Final = 0.001
"""Seconds of an engine's clock in one of ours."""


@pytest.mark.parametrize(
    ("failing", "how"),
    [("prefill", "fail"), ("prefill", "die_during"), ("prefill", "unavailable"), ("decode", "unavailable")],
)
async def test_a_failed_leg_of_an_sglang_server_frees_its_partner_within_a_second(failing: str, how: str) -> None:
    """The partner has one place, which the next attempt gets, before a second has passed by its own clock. Only the
    abort can have freed it: it waits for the other leg for 300 s, and looks after 4 s whether its client is there.
    """
    clock = EmulatedClock(SLOW)
    patient: dict[str, Any] = {"max_running": 1, "speed": SLOW, "transfer_times": "0,0", "transfer_timeout": 300.0}
    async with emulated("sglang", prefill=2, **patient) as fleet:
        before = clock.now()
        first = await prefilled_by(fleet)
        victim, partner = (first, fleet.decode[0]) if failing == "prefill" else (fleet.decode[0], first)
        await fleet.arm(victim, **{how: 1})
        second = await prefilled_by(fleet)
        assert how == "unavailable" or second != first, "it has gone where the prefix is, and failed there"
        assert how == "die_during" or not await fleet.is_armed(victim)
        await until(lambda: fleet.open_calls([partner]) == 0)
        assert clock.now() - before < 1.0


async def prefilled_by(fleet: Fleet) -> str:
    """Make a call, and return the URL of the worker that has computed its prompt. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S), fleet.router.post(chat(LONG, max_tokens=8)) as post:
        response = await post.response()
        assert response.status == 200
        return f"http://{response.headers['x-d2lpm-prefill-worker']}"
