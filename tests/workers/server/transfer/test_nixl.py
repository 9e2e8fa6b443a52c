"""Prefill and decode on two emulated vLLM engines with NIXL: the wire as a router sees it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.workers_http import (
    CHAT,
    CONTINUOUS,
    TEXT,
    Json,
    call,
    chat,
    content,
    eventually,
    series,
    stream,
    text,
    worker,
)
from workers.api.choice import Choice
from workers.engine.engine import default_config
from workers.engine.hardware import HARDWARE
from workers.engine.vllm_engine import VllmEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop, Mailbox
from workers.server.transfer.exchange import Message, Unreachable
from workers.server.transfer.legs import Leg
from workers.server.transfer.nixl import NixlConnector, SideChannel
from workers.server.transfer.pulls import TransferTimes

PREFILL: Json = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = "the same long beginning of every prompt " * 8


class Decoding:
    """The connector of a decode engine that steps only if a test says so, and what it asks the prefill engine."""

    def __init__(self, lease: float = 30.0) -> None:
        self.questions = asyncio.Queue[Message]()
        self.engine = VllmEngine(default_config("vllm"), HARDWARE["instant"])
        self.loop = EngineLoop([self.engine], 1.0)
        self.connector = NixlConnector(
            [self.engine],
            self.loop,
            EmulatedClock(1.0),
            self,
            SideChannel("", 0),
            lease=lease,
            times=TransferTimes(0, 0),
            recompute=False,
        )

    def leg(self) -> Leg:
        """Return that of a request whose prompt is held as request 7 of the engine p."""
        params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p"}
        address = {"remote_request_id": "7", "remote_host": "host", "remote_port": 1}
        return self.connector.leg({"kv_transfer_params": params | address}, {}, TEXT)

    def submit(self, leg: Leg) -> Mailbox:
        mailbox = Mailbox()
        self.loop.open(mailbox, [([1, 2, 3], 1, 0)], True, lambda: 0, pulls=leg.pulls)
        leg.submit(mailbox, [Choice(0, [1, 2, 3])])
        return mailbox

    async def asked(self) -> Message:
        """Return the next question, waiting for it."""
        async with asyncio.timeout(60):
            return await self.questions.get()

    async def ask(self, address: str, question: Message) -> Message:
        """As an `Exchange`: only the prefill engine answers."""
        if address != "http://host:1":
            raise Unreachable(address)
        self.questions.put_nowait(question)
        return {"known": True, "right": True}


@pytest.fixture(scope="module")
def prefill() -> Iterator[str]:
    with worker(role="prefill") as url:
        yield url


@pytest.fixture(scope="module")
def decode() -> Iterator[str]:
    with worker(role="decode") as url:
        yield url


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with worker() as url:
        yield url


async def prefilled(http: aiohttp.ClientSession, url: str, path: str, body: Json) -> Json:
    """Return the whole answer of a prefill."""
    answer: Json = await call(http, url + path, body | {"max_tokens": 1, "kv_transfer_params": PREFILL})
    return answer


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (TEXT, text(PROMPT, max_tokens=20))])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_handed_off_answer_is_that_of_one_engine(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession, path: str, body: Json, streamed: bool
) -> None:
    """Text and usage are the same, whether streamed or not, in both APIs."""

    async def answered(url: str, **params: Any) -> tuple[str, Json]:
        if streamed:
            *events, usage = await stream(http, url + path, body | {"stream_options": CONTINUOUS} | params)
            return content(events), usage["usage"]
        answer = await call(http, url + path, body | params)
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], answer["usage"]

    first = await prefilled(http, prefill, path, body)
    handed = await answered(decode, kv_transfer_params=first["kv_transfer_params"])
    truth, usage = await answered(alone)
    assert handed[0] == truth
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert handed[1][count] == usage[count]
    cached = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert handed[1]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_a_prefill_answers_with_the_parameters_of_the_hand_off(prefill: str, http: aiohttp.ClientSession) -> None:
    """They name the blocks, the engine and its side channel, and say what the prefill found cached."""
    answer = await prefilled(http, prefill, TEXT, text("a prompt that nobody has sent before"))
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_prefill_cached_tokens"] == 0
    (blocks,) = params["remote_block_ids"]
    assert len(blocks) == -(-answer["usage"]["prompt_tokens"] // 4)
    assert params["remote_host"] == "127.0.0.1"
    assert f":{params['remote_port']}" not in prefill
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_streamed_prefill_says_nothing_of_its_hand_off(prefill: str, http: aiohttp.ClientSession) -> None:
    """Chunks have no parameters, although the KV is held: a prefill must not be streamed."""
    for path, body in ((TEXT, text(PROMPT)), (CHAT, chat(PROMPT))):
        body |= {"max_tokens": 1, "kv_transfer_params": PREFILL, "stream_options": CONTINUOUS}
        assert not [event for event in await stream(http, prefill + path, body) if "kv_transfer_params" in event]


async def test_only_the_prefill_engine_computes_the_prompt(http: aiohttp.ClientSession) -> None:
    """The decode engine gets all tokens of the prompt that it does not hold from the other, by both its counters."""
    with worker(role="prefill") as prefill, worker(role="decode") as decode:
        first = await prefilled(http, prefill, TEXT, text(PROMPT))
        await call(http, decode + TEXT, text(PROMPT, kv_transfer_params=first["kv_transfer_params"]))
        counts = await series(http, decode)
        pinned = (await series(http, prefill))["vllm:kv_cache_usage_perc"]
    prompt = first["usage"]["prompt_tokens"]
    assert counts["vllm:external_prefix_cache_hits_total"] == prompt
    assert counts["vllm:prompt_tokens_by_source_total"] == prompt
    assert counts["vllm:prompt_tokens_total"] == prompt
    assert pinned == 0.0


async def test_a_prefill_stays_in_memory_until_it_is_read(http: aiohttp.ClientSession) -> None:
    """The usage of the cache shows the pin, and a read ends it."""
    with worker(role="prefill") as prefill, worker(role="decode") as decode:
        first = await prefilled(http, prefill, TEXT, text(PROMPT))
        assert (await series(http, prefill))["vllm:kv_cache_usage_perc"] > 0
        await call(http, decode + TEXT, text(PROMPT, kv_transfer_params=first["kv_transfer_params"]))
        counts = await series(http, prefill)
    assert counts["vllm:kv_cache_usage_perc"] == 0
    assert counts["vllm:nixl_num_kv_expired_reqs_total"] == 0
    assert counts["vllm:nixl_num_notifications_after_expiry_total"] == 0


async def test_a_lease_ends_by_itself(http: aiohttp.ClientSession) -> None:
    """After its seconds the blocks are free, and the end is counted, although no other call arrives."""
    with worker(role="prefill", kv_lease=0.05) as prefill:
        await prefilled(http, prefill, TEXT, text(PROMPT))

        async def freed() -> bool:
            counts = await series(http, prefill)
            return counts["vllm:kv_cache_usage_perc"] == 0 and counts["vllm:nixl_num_kv_expired_reqs_total"] == 1

        await eventually(freed)


@pytest.mark.parametrize("reused", [False, True])
async def test_a_late_read_is_answered_200_with_whatever_the_blocks_contain(
    alone: str, http: aiohttp.ClientSession, reused: bool
) -> None:
    """It is the truth while the blocks are unused, and other tokens after; the prefill engine counts both. The decode
    engine caches either, and answers from it later.
    """
    body = text(PROMPT, max_tokens=20)
    with worker(role="prefill", kv_lease=0.05, kv_tokens=400) as prefill, worker(role="decode") as decode:
        first = await prefilled(http, prefill, TEXT, body)

        async def expired() -> bool:
            return (await series(http, prefill))["vllm:nixl_num_kv_expired_reqs_total"] == 1

        await eventually(expired)
        for number in range(8 if reused else 0):
            await call(http, prefill + TEXT, text(f"{number} " * 100))
        late = await call(http, decode + TEXT, body | {"kv_transfer_params": first["kv_transfer_params"]})
        counts = await series(http, prefill)
        again = await call(http, decode + TEXT, body)
    truth = await call(http, alone + TEXT, body)
    assert (late["choices"][0]["text"] != truth["choices"][0]["text"]) == reused
    assert again["choices"] == late["choices"]
    assert late["usage"] == truth["usage"] | {"prompt_tokens_details": late["usage"]["prompt_tokens_details"]}
    assert counts["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_a_request_in_the_decode_engine_renews_its_lease() -> None:
    """While it waits there for memory, heartbeats go to the prefill engine, a sixth of the lease apart."""
    decoding = Decoding(lease=0.06)
    leg = decoding.leg()
    mailbox = decoding.submit(leg)
    for _ in range(3):
        assert await decoding.asked() == {"kind": "renew", "engine": "p", "request": "7"}
    leg.close(mailbox)
    await decoding.connector.close()


async def test_a_refusal_to_a_stranger_is_notified_with_the_next_step() -> None:
    """A decode engine without work takes none, so the prefill engine's blocks stay held; later ones are released at
    once.
    """
    decoding = Decoding()
    decoding.leg().refuse()
    for _ in range(10):
        await asyncio.sleep(0)
    assert decoding.questions.empty()
    stepping = asyncio.create_task(decoding.loop.run())
    decoding.loop.open(Mailbox(), [([1, 2, 3], 1, 0)], True, lambda: 0)
    assert await decoding.asked() == {"kind": "release", "engine": "p", "request": "7"}
    stepping.cancel()
    decoding.leg().refuse()
    assert (await decoding.asked())["kind"] == "release"
    await decoding.connector.close()


async def test_a_request_that_leaves_with_its_memory_is_read_all_the_same() -> None:
    """The read has begun by then, and releases the prefill engine's blocks."""
    decoding = Decoding()
    leg = decoding.leg()
    mailbox = decoding.submit(leg)
    assert (await decoding.asked())["kind"] == "renew"
    decoding.engine.step()
    decoding.connector.pulls.note_allocated()
    decoding.loop.close(mailbox)
    leg.close(mailbox)
    assert (await decoding.asked())["kind"] == "read"
    await decoding.connector.close()


@pytest.mark.parametrize("strangers", [False, True])
async def test_a_refusal_by_the_decode_engine_releases(http: aiohttp.ClientSession, strangers: bool) -> None:
    """A model that it does not have is 404, and the prefill engine's blocks are free: at once if it has read from it
    before, else after its next step.
    """
    with worker(role="prefill") as prefill, worker(role="decode") as decode:
        if not strangers:
            first = await prefilled(http, prefill, TEXT, text(PROMPT))
            await call(http, decode + TEXT, text(PROMPT, kv_transfer_params=first["kv_transfer_params"]))
        first = await prefilled(http, prefill, TEXT, text(PROMPT))
        body = text(PROMPT, model="no such model", kv_transfer_params=first["kv_transfer_params"])
        await call(http, decode + TEXT, body, 404)

        async def freed() -> bool:
            return (await series(http, prefill))["vllm:kv_cache_usage_perc"] == 0

        if strangers:
            await call(http, decode + TEXT, text("the next step"))
        await eventually(freed)
        assert (await series(http, prefill))["vllm:nixl_num_kv_expired_reqs_total"] == 0


async def test_a_prompt_whose_prefill_engine_died_fails_at_once(http: aiohttp.ClientSession) -> None:
    """Whole answers are 500, streams end with an error; with the other policy the decode engine computes the prompt."""
    with (
        worker(role="decode") as strict,
        worker(role="decode", kv_load_failure_policy="recompute") as lenient,
        worker() as alone,
    ):
        with worker(role="prefill") as prefill:
            first = await prefilled(http, prefill, TEXT, text(PROMPT))
        body = text(PROMPT, kv_transfer_params=first["kv_transfer_params"])
        error = await call(http, strict + TEXT, body, 500)
        assert error["error"]["type"] == "InternalServerError"
        (event,) = await stream(http, strict + TEXT, body)
        assert event["error"]["code"] == 500
        answer = await call(http, lenient + TEXT, body)
        truth = await call(http, alone + TEXT, text(PROMPT))
        assert answer["choices"][0]["text"] == truth["choices"][0]["text"]
        left = await series(http, strict)
    assert left["vllm:kv_cache_usage_perc"] == left["vllm:num_requests_waiting"] == 0


async def test_another_process_at_the_same_address_is_no_prefill_engine(http: aiohttp.ClientSession) -> None:
    """Parameters of an engine that has been restarted are answered 500, not with other KV."""
    with worker(role="decode") as decode:
        with worker(role="prefill") as prefill:
            params = (await prefilled(http, prefill, TEXT, text(PROMPT)))["kv_transfer_params"]
        with worker(role="prefill", side_port=params["remote_port"]):
            await call(http, decode + TEXT, text(PROMPT, kv_transfer_params=params), 500)


async def test_a_client_that_leaves_the_decode_engine_releases(http: aiohttp.ClientSession) -> None:
    """A call that is closed while its KV is under way leaves no memory in use on either side."""
    with worker(role="prefill") as prefill, worker(role="decode", transfer_times="3000,0") as decode:
        first = await prefilled(http, prefill, TEXT, text(PROMPT))
        body = text(PROMPT, kv_transfer_params=first["kv_transfer_params"])
        leaving = asyncio.create_task(call(http, decode + TEXT, body))

        async def loading() -> bool:
            counts = await series(http, decode)
            return counts["vllm:kv_cache_usage_perc"] > 0 and counts["vllm:num_requests_waiting"] == 1

        await eventually(loading)
        leaving.cancel()

        async def freed() -> bool:
            used = [(await series(http, url))["vllm:kv_cache_usage_perc"] for url in (prefill, decode)]
            return used == [0, 0]

        await eventually(freed)


async def test_a_call_of_the_wrong_types_releases_nothing(
    prefill: str, decode: str, http: aiohttp.ClientSession
) -> None:
    """It is refused before the engine's part that would notify the prefill engine."""
    first = await prefilled(http, prefill, TEXT, text("of the wrong types"))
    params = {"kv_transfer_params": first["kv_transfer_params"]}
    await call(http, decode + TEXT, text(PROMPT, max_tokens="many") | params, 400)
    await call(http, decode + TEXT, text("the next step"))
    answer = await call(http, decode + TEXT, text("of the wrong types") | params)
    assert answer["usage"]["completion_tokens"] == 3
    assert (await series(http, prefill))["vllm:nixl_num_notifications_after_expiry_total"] == 0


@pytest.mark.parametrize("params", ["text", 5, [1]])
async def test_parameters_that_are_no_object_are_refused(decode: str, http: aiohttp.ClientSession, params: Any) -> None:
    """Such a call is 400."""
    await call(http, decode + TEXT, text(kv_transfer_params=params), 400)


async def test_a_decode_engine_without_parameters_computes_the_prompt(
    decode: str, alone: str, http: aiohttp.ClientSession
) -> None:
    """It answers as one engine does; so it does if the parameters lack an address."""
    truth = await call(http, alone + TEXT, text(PROMPT))
    for params in ({}, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": [[1]]}):
        answer = await call(http, decode + TEXT, text(PROMPT, kv_transfer_params=params))
        assert answer["choices"][0]["text"] == truth["choices"][0]["text"]


async def test_an_engine_without_a_connector_knows_no_parameters(alone: str, http: aiohttp.ClientSession) -> None:
    """It answers null, and shows no series of NIXL."""
    answer = await prefilled(http, alone, TEXT, text(PROMPT))
    assert answer["kv_transfer_params"] is None
    assert not [name for name in await series(http, alone) if "nixl" in name]


async def test_ranks_hand_off_to_ranks(alone: str, http: aiohttp.ClientSession) -> None:
    """Each rank of the prefill engine has a name of its own, and any rank of the decode engine reads from it."""
    body = text(PROMPT, max_tokens=20)
    truth = await call(http, alone + TEXT, body)
    engines = set()
    with worker(role="prefill", ranks=2) as prefill, worker(role="decode", ranks=2) as decode:
        for source in "01":
            for target in "01":
                rank = {"X-data-parallel-rank": source}
                wanted = body | {"max_tokens": 1, "kv_transfer_params": PREFILL}
                params = (await call(http, prefill + TEXT, wanted, 200, **rank))["kv_transfer_params"]
                engines.add(params["remote_engine_id"])
                rank = {"X-data-parallel-rank": target}
                answer = await call(http, decode + TEXT, body | {"kv_transfer_params": params}, 200, **rank)
                assert answer["choices"][0]["text"] == truth["choices"][0]["text"]
    assert len(engines) == 2
    assert all(name.endswith(("_dp0", "_dp1")) for name in engines)
