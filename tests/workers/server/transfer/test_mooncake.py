"""Prefill and decode on two emulated vLLM engines with Mooncake: the wire as a router sees it."""

import asyncio
from collections.abc import Iterator
from itertools import count

import aiohttp
import pytest

from tests.support.workers_http import CHAT, TEXT, Json, call, chat, eventually, series, text, worker
from workers.engine.sampling import answer_length, initial_state
from workers.engine.tokenizer import encode

PROMPT = "the same long beginning of every prompt " * 8
serial = count()


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with worker() as url:
        yield url


async def legs(http: aiohttp.ClientSession, prefill: str, rank: str = "0") -> tuple[Json, Json]:
    """Return the parameters of both calls, as a router makes them up."""
    async with http.get(f"{prefill}/server_info") as response:
        side_port = (await response.json())["vllm_env"]["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    async with http.get(f"http://127.0.0.1:{side_port}/query") as response:
        engines = await response.json()
    transfer = {"transfer_id": f"t{next(serial)}"}
    first = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    second = {"do_remote_decode": False, "do_remote_prefill": True, **transfer}
    address = {"remote_engine_id": engines[rank]["engine_id"], "remote_bootstrap_addr": f"http://127.0.0.1:{side_port}"}
    return {"kv_transfer_params": first}, {"kv_transfer_params": second | address}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (TEXT, text(PROMPT, max_tokens=20))])
@pytest.mark.parametrize("order", ["prefill first", "at once", "decode first"])
async def test_two_calls_answer_as_one_engine(
    alone: str, http: aiohttp.ClientSession, path: str, body: Json, order: str
) -> None:
    """Whichever comes first; the prefill answers without parameters, and its memory is released."""
    with worker(role="prefill", connector="mooncake") as prefill, worker(role="decode", connector="mooncake") as decode:
        first, second = await legs(http, prefill)
        calls = [(prefill, body | first | {"max_tokens": 1}), (decode, body | second)]
        tasks = []
        for url, sent in reversed(calls) if order == "decode first" else calls:
            tasks.append(asyncio.create_task(call(http, url + path, sent)))
            if order != "at once" and url == prefill:
                await tasks[-1]
        answers = await asyncio.gather(*(tasks[::-1] if order == "decode first" else tasks))
        counts = await series(http, prefill)
    truth = await call(http, alone + path, body)
    key = "message" if path == CHAT else "text"
    assert answers[0]["kv_transfer_params"] is None
    assert answers[1]["choices"][0][key] == truth["choices"][0][key]
    assert answers[1]["usage"]["prompt_tokens"] == truth["usage"]["prompt_tokens"]
    assert counts["vllm:kv_cache_usage_perc"] == 0
    assert not [name for name in counts if "nixl" in name]


async def test_each_rank_has_an_engine_id_of_its_own(alone: str, http: aiohttp.ClientSession) -> None:
    """The decode engine gets the KV only from the rank that it names."""
    body = text(PROMPT, max_tokens=20)
    with (
        worker(role="prefill", connector="mooncake", ranks=2) as prefill,
        worker(role="decode", connector="mooncake", transfer_timeout=2.0) as decode,
    ):
        for named, status in (("1", 200), ("0", 500)):
            first, second = await legs(http, prefill, named)
            await call(http, prefill + TEXT, body | first | {"max_tokens": 1}, 200, **{"X-data-parallel-rank": "1"})
            answer = await call(http, decode + TEXT, body | second, status)
            if status == 200:
                truth = await call(http, alone + TEXT, body)
                assert answer["choices"][0]["text"] == truth["choices"][0]["text"]


async def test_what_nobody_asks_for_is_released_after_a_time(http: aiohttp.ClientSession) -> None:
    """Until then it is held."""
    with worker(role="prefill", connector="mooncake", transfer_timeout=0.3) as prefill:
        first, _ = await legs(http, prefill)
        await call(http, prefill + TEXT, text(PROMPT, max_tokens=1) | first)

        async def freed() -> bool:
            return (await series(http, prefill))["vllm:kv_cache_usage_perc"] == 0

        await eventually(freed)


async def test_a_refusal_by_the_decode_engine_releases(http: aiohttp.ClientSession) -> None:
    """Here, of a model that it does not have."""
    with worker(role="prefill", connector="mooncake") as prefill, worker(role="decode", connector="mooncake") as decode:
        first, second = await legs(http, prefill)
        await call(http, prefill + TEXT, text(PROMPT, max_tokens=1) | first)
        assert (await series(http, prefill))["vllm:kv_cache_usage_perc"]
        await call(http, decode + TEXT, text(PROMPT, model="another") | second, 404)

        async def released() -> bool:
            return not (await series(http, prefill))["vllm:kv_cache_usage_perc"]

        await eventually(released)


async def test_what_is_computed_of_a_call_that_was_cut_is_released_after_a_time(http: aiohttp.ClientSession) -> None:
    """Its KV is held like any other prompt's, though nobody can know of it."""
    with worker(role="prefill", connector="mooncake", transfer_timeout=0.3, step_times="3000,0,0") as prefill:
        first, _ = await legs(http, prefill)

        async def holds_something() -> bool:
            return (await series(http, prefill))["vllm:kv_cache_usage_perc"] > 0

        async def is_free() -> bool:
            return not await holds_something()

        cut = asyncio.create_task(call(http, prefill + TEXT, text(PROMPT, max_tokens=1) | first))
        await eventually(holds_something)
        cut.cancel()
        await eventually(is_free)


async def test_a_prefill_that_ends_with_its_first_token_keeps_nothing(http: aiohttp.ClientSession) -> None:
    """Its decode engine gets no prompt, and fails or computes the prompt itself; `ignore_eos` avoids it."""
    ending = prompt_without_answer()
    body = {"prompt": ending, "max_tokens": 5}
    with (
        worker(role="prefill", connector="mooncake") as prefill,
        worker(role="decode", connector="mooncake", transfer_timeout=0.5) as decode,
    ):
        first, second = await legs(http, prefill)
        answer = await call(http, prefill + TEXT, body | first | {"max_tokens": 1})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert (await series(http, prefill))["vllm:kv_cache_usage_perc"] == 0
        await call(http, decode + TEXT, body | second, 500)
        first, second = await legs(http, prefill)
        await call(http, prefill + TEXT, body | first | {"max_tokens": 1, "ignore_eos": True})
        answer = await call(http, decode + TEXT, body | second)
    assert answer["choices"][0]["finish_reason"] == "stop"


def prompt_without_answer() -> str:
    """Return a prompt whose answer is empty."""
    for number in range(10_000):
        prompt = f"question {number}?"
        if answer_length(initial_state(0, encode(prompt), 0), False, 5) == 1:
            return prompt
    raise AssertionError("no such prompt")
