"""What is asked of engines that run already: their model, their counters, and to empty their prefix caches.

vLLM and SGLang are told apart by what they answer, so that the caller need not say which one is where.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from bench.live.clients import LoadError

BUSY: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""The gauges that are 0 in an idle vLLM. SGLang, whose gauges lag, refuses to empty its cache until it is idle."""
EMPTY_PATHS: Final = ("/reset_prefix_cache", "/flush_cache")
"""How vLLM and SGLang are told to empty their prefix caches."""
ASK_SECONDS: Final = 10.0
"""How long any answer may take."""
WAIT_SECONDS: Final = 20.0
"""How long an engine may take to end the calls of the round before, and a router to find its workers."""
LOOK_SECONDS: Final = 0.1


class Counted(NamedTuple):
    """Prompt tokens as engines count them, since they started; None if one of them does not."""

    prompt_tokens: float | None
    cached_tokens: float | None

    def hit_rate_since(self, before: "Counted") -> float | None:
        """Return the cached tokens per prompt token of the time between."""
        if None in (*self, *before):
            return None
        prompts, cached = (after - earlier for after, earlier in zip(self, before, strict=True))  # type: ignore[operator]
        return cached / prompts if prompts else None


async def common_model(http: aiohttp.ClientSession, urls: Sequence[str]) -> str:
    """Return the model that all engines serve. Raises LoadError if one does not answer, or if they differ."""
    models = [await _model(http, url) for url in urls]
    for url, model in zip(urls, models, strict=True):
        if model != models[0]:
            raise LoadError(f"{urls[0]} serves {models[0]!r}, but {url} serves {model!r}")
    return models[0]


async def _model(http: aiohttp.ClientSession, url: str) -> str:
    _, body = await _answer(http, "GET", url, "/v1/models")
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{url}/v1/models names no model") from None


async def emptied(http: aiohttp.ClientSession, url: str) -> bool:
    """Empty an engine's prefix cache once it is idle; return False if it refuses. Raises LoadError if it is away."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                series = await _series(http, url)
                if not any(series.get(name) for name in BUSY):
                    statuses = [(await _answer(http, "POST", url, path))[0] for path in EMPTY_PATHS]
                    if set(statuses) <= {200, 404}:
                        return 200 in statuses
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        return False


async def all_known(http: aiohttp.ClientSession, router: str, count: int) -> None:
    """Return once a router has found this many healthy engines. Raises LoadError if it does not."""
    healthy: set[str] = set()
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while len(healthy) < count:
                await asyncio.sleep(LOOK_SECONDS)
                _, body = await _answer(http, "GET", router, "/workers")
                healthy = {worker["url"] for worker in orjson.loads(body)["workers"] if worker["healthy"]}
    except TimeoutError:
        raise LoadError(f"the router found only {len(healthy)} of {count} engines in {WAIT_SECONDS:g} s") from None


async def counted(http: aiohttp.ClientSession, urls: Sequence[str]) -> Counted:
    """Return what all engines together have counted. Raises LoadError if one does not answer.

    vLLM's `prefix_cache_hits` is not used: it counts a prompt that finds no room again at each try to schedule it.
    """
    prompts: list[float | None] = []
    cached: list[float | None] = []
    for url in urls:
        series = await _series(http, url)
        if "sglang:num_running_reqs" in series:  # its counters are absent until their first increment
            prompts.append(series.get("sglang:prompt_tokens_total", 0.0))
            cached.append(series.get("sglang:cached_tokens_total", 0.0))
        else:
            prompts.append(series.get("vllm:prompt_tokens_total"))
            cached.append(series.get("vllm:prompt_tokens_cached_total"))
    return Counted(_sum(prompts), _sum(cached))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


async def _series(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the samples of an engine's metrics by name, summed over their labels; none if it has no metrics."""
    status, body = await _answer(http, "GET", url, "/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()) if status == 200 else ():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def _answer(http: aiohttp.ClientSession, method: str, url: str, path: str) -> tuple[int, bytes]:
    """Return a status and a body. Raises LoadError if no server answers."""
    try:
        async with http.request(method, url + path) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError) as error:
        reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise LoadError(f"no server at {url}: {reason or type(reason).__name__}") from None
