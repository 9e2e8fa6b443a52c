"""Prefill and decode on two emulated SGLang servers: both legs at once, in a room, as a router sees it."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import aiohttp
import pytest

from tests.support.workers_http import CHAT, TEXT, Json, call, chat, eventually, series, text, worker
from workers.server.transfer.meetings import Meetings, Offer

numbers = count(10)
PROMPT = "the same long beginning of every prompt " * 8


@pytest.fixture(scope="module")
def prefill() -> Iterator[str]:
    with worker(dialect="sglang", role="prefill") as url:
        yield url


@pytest.fixture(scope="module")
def decode() -> Iterator[str]:
    with worker(dialect="sglang", role="decode") as url:
        yield url


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with worker(dialect="sglang") as url:
        yield url


async def room(http: aiohttp.ClientSession, prefill: str) -> Json:
    """Return the fields that both legs need, as a router finds them, with a room of their own."""
    async with http.get(f"{prefill}/server_info") as response:
        info = await response.json()
    assert info["disaggregation_mode"] == "prefill"
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": info["disaggregation_bootstrap_port"],
        "bootstrap_room": next(numbers),
    }


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (TEXT, text(PROMPT, max_tokens=20))])
async def test_two_legs_answer_as_one_engine(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession, path: str, body: Json
) -> None:
    """Text and usage of the decode leg are those of one engine, and its cached tokens those of the prefill leg."""
    for _ in range(2):
        legs = body | await room(http, prefill)
        first, second = await asyncio.gather(call(http, prefill + path, legs), call(http, decode + path, legs))
        truth = await call(http, alone + path, body)
        key = "message" if path == CHAT else "text"
        assert second["choices"][0][key] == truth["choices"][0][key]
        assert second["usage"] == truth["usage"]
        assert second["usage"]["prompt_tokens_details"] == first["usage"]["prompt_tokens_details"]
        assert first["usage"]["completion_tokens"] == 1


async def load(http: aiohttp.ClientSession, url: str) -> Json:
    """Return the load of the only rank."""
    async with http.get(f"{url}/v1/loads") as response:
        (entry,) = (await response.json())["loads"]
    loads: Json = entry
    return loads


async def test_either_leg_may_come_first(prefill: str, decode: str, alone: str, http: aiohttp.ClientSession) -> None:
    """The first one waits for the other, and computes nothing before."""
    truth = await call(http, alone + TEXT, text(PROMPT, max_tokens=20))
    for first, second in ((prefill, decode), (decode, prefill)):
        legs = text(PROMPT, max_tokens=20) | await room(http, prefill)
        before = (await load(http, prefill))["total_prefill_uncached_tokens"]
        waiting = asyncio.create_task(call(http, first + TEXT, legs))
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        assert (await load(http, prefill))["total_prefill_uncached_tokens"] == before
        answers = {second: await call(http, second + TEXT, legs), first: await waiting}
        assert answers[decode]["choices"] == truth["choices"]


async def test_the_kv_is_released_when_both_have_answered(
    prefill: str, decode: str, http: aiohttp.ClientSession
) -> None:
    """Neither server uses memory then."""
    legs = text(PROMPT) | await room(http, prefill)
    await asyncio.gather(call(http, prefill + TEXT, legs), call(http, decode + TEXT, legs))
    for url in (prefill, decode):
        assert (await load(http, url))["num_used_tokens"] == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_leg_alone_fails_when_its_time_is_over(http: aiohttp.ClientSession, streamed: bool) -> None:
    """Whole answers are 500, streams report it in an event; until then, the decode leg has a slot and memory."""
    limits = {"transfer_timeout": 3.0, "max_running": 1}
    with (
        worker(dialect="sglang", role="prefill", **limits) as prefill,
        worker(dialect="sglang", role="decode", **limits) as decode,
    ):
        legs = text(PROMPT, stream=streamed) | await room(http, prefill)

        async def failed(url: str) -> bytes:
            async with http.post(url + TEXT, json=legs) as response:
                assert response.status == (200 if streamed else 500)
                return await response.read()

        waiting = asyncio.create_task(failed(decode))

        async def blocked() -> bool:
            return bool((await load(http, decode))["num_used_tokens"])

        await eventually(blocked)
        body = await waiting
        assert b"KVPoll.WaitingForInput" in body
        assert b"KVTransferError" in body
        assert body.endswith(b"data: [DONE]\n\n") == streamed
        assert (await load(http, decode))["num_used_tokens"] == 0
        legs |= await room(http, prefill)
        assert b"KVPoll.Bootstrapping" in await failed(prefill)


async def test_an_abort_frees_the_slot_of_a_decode_leg_at_once(prefill: str, http: aiohttp.ClientSession) -> None:
    """Without one, a second request has no slot while the first waits for its prefill."""
    with worker(dialect="sglang", role="decode", max_running=1) as decode:
        legs = text(PROMPT, rid="stuck") | await room(http, prefill)
        stuck = asyncio.create_task(call(http, decode + TEXT, legs))

        async def blocked() -> bool:
            return bool((await load(http, decode))["num_used_tokens"])

        await eventually(blocked)
        legs = text(PROMPT) | await room(http, prefill)
        both = asyncio.gather(call(http, prefill + TEXT, legs), call(http, decode + TEXT, legs))
        done, _ = await asyncio.wait([both], timeout=0.3)
        assert not done
        async with http.post(f"{decode}/abort_request", json={"rid": "stuck"}) as response:
            assert response.status == 200
        assert (await stuck)["choices"][0]["finish_reason"] == "abort"
        _, answer = await both
        assert answer["usage"]["completion_tokens"] == 3


async def test_an_abort_ends_a_prefill_leg_that_waits(prefill: str, http: aiohttp.ClientSession) -> None:
    """It answers at once, and has computed nothing."""
    legs = text(PROMPT, rid="alone") | await room(http, prefill)
    waiting = asyncio.create_task(call(http, prefill + TEXT, legs))

    async def aborted() -> bool:
        async with http.post(f"{prefill}/abort_request", json={"rid": "alone"}) as response:
            assert response.status == 200
        return waiting.done()

    await eventually(aborted)
    answer = await waiting
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("left", [False, True])
async def test_a_prefill_aborted_in_transfer_leaves_its_decode_leg_waiting(
    http: aiohttp.ClientSession, left: bool
) -> None:
    """Its answer is 200 and "length", unless its client has left; the decode leg waits until its own time is over."""
    with (
        worker(dialect="sglang", role="prefill", transfer_times="60000,0") as prefill,
        worker(dialect="sglang", role="decode", transfer_timeout=2.0) as decode,
    ):
        legs = text(PROMPT, rid="same") | await room(http, prefill)
        first = asyncio.create_task(call(http, prefill + TEXT, legs))
        second = asyncio.create_task(call(http, decode + TEXT, legs, 500))

        async def in_transfer() -> bool:
            return (await series(http, prefill))["sglang:num_prefill_inflight_queue_reqs"] == 1

        await eventually(in_transfer)
        if left:
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
        else:
            await http.post(f"{prefill}/abort_request", json={"rid": "same"})
            assert (await first)["choices"][0]["finish_reason"] == "length"
        error = await second
        assert "KVPoll.WaitingForInput" in error["message"]


async def test_a_decode_leg_whose_prefill_server_is_gone_fails_after_two_heartbeats(
    http: aiohttp.ClientSession,
) -> None:
    """It does not wait for the whole timeout."""
    with worker(dialect="sglang", role="decode", speed=50.0) as decode:
        with worker(dialect="sglang", role="prefill") as prefill:
            legs = text(PROMPT) | await room(http, prefill)
        error = await call(http, decode + TEXT, legs, 500)
    assert "Lost connection with prefill instance" in error["message"]


async def test_two_requests_in_one_room_get_the_same_kv() -> None:
    """Nothing tells them apart: what is offered last goes to all that wait."""
    meetings = Meetings()
    waiting = [asyncio.create_task(meetings.wait_for_offer("5")) for _ in range(2)]
    await asyncio.sleep(0)
    for prompt in (1, 2):
        meetings.at("5").make(Offer(prompt, 0, 0, 10))
    offers = [await each for each in waiting]
    assert [offer and offer.fingerprint for offer in offers] == [2, 2]


async def test_the_kv_of_another_prompt_gives_another_answer(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession
) -> None:
    """A decode leg in the room of another request is answered 200, with other tokens than the truth."""
    where = await room(http, prefill)
    body = text(PROMPT, max_tokens=20)
    _, answer = await asyncio.gather(
        call(http, prefill + TEXT, text("other", max_tokens=20) | where), call(http, decode + TEXT, body | where)
    )
    truth = await call(http, alone + TEXT, body)
    assert answer["choices"][0]["text"] != truth["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_without_a_room_is_refused(role: str, http: aiohttp.ClientSession) -> None:
    """A plain completion is 400."""
    with worker(dialect="sglang", role=role) as url:
        error = await call(http, url + TEXT, text(PROMPT), 400)
    assert "bootstrap room" in error["message"]


async def test_a_prefill_without_a_room_takes_down_a_server_with_ranks(http: aiohttp.ClientSession) -> None:
    """Its controller chooses the rank by the room, and fails without one: never probe such a server."""
    with worker(dialect="sglang", role="prefill", ranks=2) as prefill:
        for _ in range(2):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await call(http, prefill + TEXT, text(PROMPT))


async def test_headers_of_chats_name_the_room(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession
) -> None:
    """They override the body's fields."""
    where = await room(http, prefill)
    headers = {f"x-override-{field.replace('_', '-')}": str(value) for field, value in where.items()}
    body = chat(PROMPT, bootstrap_room=1)
    _, answer = await asyncio.gather(
        call(http, prefill + CHAT, body, 200, **headers), call(http, decode + CHAT, body, 200, **headers)
    )
    assert answer["choices"] == (await call(http, alone + CHAT, body))["choices"]


async def test_lists_of_prompts_have_lists_of_rooms(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession
) -> None:
    """Each prompt's legs meet in a room of their own."""
    where = await room(http, prefill)
    prompts = [f"{name} {PROMPT}" for name in ("first", "second")]
    lists = {field: [value] * 2 for field, value in where.items()} | {"bootstrap_room": [next(numbers), next(numbers)]}
    body = text(prompts)
    _, answer = await asyncio.gather(call(http, prefill + TEXT, body | lists), call(http, decode + TEXT, body | lists))
    assert answer["choices"] == (await call(http, alone + TEXT, body))["choices"]


async def test_the_room_chooses_the_rank_of_a_prefill(http: aiohttp.ClientSession) -> None:
    """Room modulo ranks, unless the call is pinned: the decode leg must name that rank, or its prompt never comes."""
    with (
        worker(dialect="sglang", role="prefill", ranks=2) as prefill,
        worker(dialect="sglang", role="decode", transfer_timeout=2.0) as decode,
    ):

        async def ranks() -> list[int]:
            async with http.get(f"{prefill}/v1/loads") as response:
                return [load["total_prefill_uncached_tokens"] for load in (await response.json())["loads"]]

        for pinned, named, status in ((None, None, 200), (0, 0, 200), (1, 0, 500), (1, None, 500)):
            where = await room(http, prefill) | {"bootstrap_room": 2 * next(numbers)}
            rank = 0 if pinned is None else pinned
            body = text(f"{pinned} {PROMPT}") | where
            before = await ranks()
            await asyncio.gather(
                call(http, prefill + TEXT, body | {"routed_dp_rank": pinned}),
                call(http, decode + TEXT, body | {"disagg_prefill_dp_rank": named}, status),
            )
            gained = [new - old for new, old in zip(await ranks(), before, strict=True)]
            assert gained[rank] > 0 == gained[1 - rank]


async def test_metrics_name_the_part_of_a_server(prefill: str, decode: str, http: aiohttp.ClientSession) -> None:
    """The label of each series, and the gauges of the queues of each part."""
    for url, part in ((prefill, "prefill"), (decode, "decode")):
        async with http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        assert all(f'engine_type="{part}"' in line for line in lines if not line.startswith("#"))
        assert [line for line in lines if line.startswith(f"sglang:num_{part}_")]
