"""Faults on command: a test of a router arms one, and exactly the calls that it asked for have it."""

from collections.abc import Iterator

import aiohttp
import pytest

from tests.support.workers_http import TEXT, Json, call, eventually, series, text, worker

PREFILL: Json = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
PROMPT = "the same long beginning of every prompt " * 8
BROKEN = (aiohttp.ClientError, ConnectionError)


@pytest.fixture
def prefill() -> Iterator[str]:
    with worker(role="prefill") as url:
        yield url


@pytest.fixture
def decode() -> Iterator[str]:
    with worker(role="decode") as url:
        yield url


async def arm(http: aiohttp.ClientSession, url: str, **calls: int) -> None:
    armed = await call(http, f"{url}/emulated/faults", calls)
    assert armed == calls


async def handed_off(http: aiohttp.ClientSession, prefill: str) -> Json:
    """Return the fields of a decode call."""
    answer = await call(http, prefill + TEXT, text(PROMPT, max_tokens=1) | PREFILL)
    return {"kv_transfer_params": answer["kv_transfer_params"]}


async def test_a_fault_has_as_many_calls_as_were_armed(prefill: str, http: aiohttp.ClientSession) -> None:
    """The others are answered as ever, and calls that cannot have a fault leave it for those that can."""
    await arm(http, prefill, no_params=2)
    await call(http, prefill + TEXT, text(PROMPT))
    assert [await handed_off(http, prefill) for _ in range(2)] == [{"kv_transfer_params": None}] * 2
    assert (await handed_off(http, prefill))["kv_transfer_params"]
    async with http.get(f"{prefill}/emulated/faults") as response:
        assert await response.json() == {}


async def test_parameters_can_be_no_object(prefill: str, http: aiohttp.ClientSession) -> None:
    """The prefill is 200 all the same."""
    await arm(http, prefill, odd_params=1)
    assert await handed_off(http, prefill) == {"kv_transfer_params": "no object"}


async def test_a_hand_off_can_be_too_old_from_the_start(prefill: str, decode: str, http: aiohttp.ClientSession) -> None:
    """Its decode is 200, with other tokens than the truth, and the prefill engine counts it."""
    truth = await call(http, prefill + TEXT, text(PROMPT, max_tokens=20))
    await arm(http, prefill, expire=1)
    late = await call(http, decode + TEXT, text(PROMPT, max_tokens=20) | await handed_off(http, prefill))
    assert late["choices"][0]["text"] != truth["choices"][0]["text"]
    counts = await series(http, prefill)
    assert counts["vllm:nixl_num_kv_expired_reqs_total"] == 1
    assert counts["vllm:nixl_num_notifications_after_expiry_total"] == 1


@pytest.mark.parametrize(("fault", "status"), [("refuse", 400), ("unavailable", 503), ("fail", 500)])
async def test_a_decode_engine_that_refuses_releases(
    prefill: str, decode: str, http: aiohttp.ClientSession, fault: str, status: int
) -> None:
    """As a refusal of its own would, with its next step."""
    params = await handed_off(http, prefill)
    await arm(http, decode, **{fault: 1})
    await call(http, decode + TEXT, text(PROMPT) | params, status)
    await call(http, decode + TEXT, text("the next step"))

    async def freed() -> bool:
        return (await series(http, prefill))["vllm:kv_cache_usage_perc"] == 0

    await eventually(freed)


@pytest.mark.parametrize("fault", ["die_before", "die_during"])
async def test_a_worker_that_dies_answers_nothing(prefill: str, http: aiohttp.ClientSession, fault: str) -> None:
    """Neither the call at which it died nor any other."""
    await arm(http, prefill, **{fault: 1})
    for _ in range(2):
        with pytest.raises(BROKEN):
            await call(http, prefill + TEXT, text(PROMPT) | PREFILL)


async def test_a_prefill_engine_that_dies_after_its_answer(
    prefill: str, decode: str, http: aiohttp.ClientSession
) -> None:
    """The answer is whole, and the decode engine finds nobody who has the KV."""
    await arm(http, prefill, die_after=1)
    params = await handed_off(http, prefill)
    assert params["kv_transfer_params"]
    with pytest.raises(BROKEN):
        await call(http, prefill + TEXT, text(PROMPT))
    await call(http, decode + TEXT, text(PROMPT) | params, 500)


async def test_a_worker_that_dies_amid_a_stream(decode: str, http: aiohttp.ClientSession) -> None:
    """The client has had some of the answer, and no end."""
    await arm(http, decode, die_in_stream=1)
    async with http.post(decode + TEXT, json=text(PROMPT, max_tokens=500, stream=True)) as response:
        received = await response.content.readuntil(b"\n\n")
        with pytest.raises(BROKEN):
            await response.read()
    assert received.startswith(b"data: {")


async def test_a_decode_leg_can_end_empty(http: aiohttp.ClientSession) -> None:
    """It is 200, has no token, and says that it ended by its length."""
    with worker(dialect="sglang", role="decode") as url:
        await arm(http, url, empty_length=1)
        answer = await call(http, url + TEXT, text(PROMPT, bootstrap_room=5))
    assert answer["usage"]["completion_tokens"] == 0
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")


async def test_an_unknown_fault_is_refused(prefill: str, http: aiohttp.ClientSession) -> None:
    """Nothing is armed then."""
    error = await call(http, f"{prefill}/emulated/faults", {"no_param": 1, "refuse": 1}, 400)
    assert "no_param" in error["error"]["message"]
    await call(http, prefill + TEXT, text(PROMPT))
