"""Asks workers whether their flags fit: for `d2lpm check`, and of each worker that joins, as warnings."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

import httpx
import orjson

from router.api.body.call import COMPLETIONS
from router.api.body.edits import NO_FIELDS, Addition, Additions, fields_named_in
from router.api.endpoints.chat import PATH as CHAT
from router.core.model.commands import Command
from router.core.model.events import Event, WorkerJoined
from router.core.model.request import WorkerId
from router.errors import WorkerBroke
from router.upstream.accepted_fields import BAD_REQUEST, AcceptedFields
from router.upstream.dialects import MODELS_PATH, EngineInfo, detect_dialect, read_engine_info, read_models
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.flag_rules import Finding, RouterNeeds, WorkerAnswers, cache_sizes, findings
from router.upstream.poll_client import fetch, fetch_any_status, polling_client

log = logging.getLogger(__name__)

PROMPT: Final = "The same words, again and again, so that the second time some of them are in the cache. " * 16
"""Some hundred tokens: more than a block of any engine's."""
STREAMS: Final[Mapping[str, Mapping[str, object]]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
"""By path: what a short call asks."""
EFFECT_OF_MISSING: Final = {
    Addition.USAGE: "clients are charged by what is predicted and by the chunks of their answers",
    Addition.CHUNK_USAGE: "until an answer ends, its output is counted by its chunks",
    Addition.TOKEN_IDS: "where it dies amid a stream, another worker goes on by the text and not by the tokens",
}
"""What it means where a field is not added."""


class WorkerCheck(NamedTuple):
    """What came of asking one worker."""

    worker: WorkerId
    card: str
    """Which engine it is and what it serves, in a line; empty where it does not answer."""
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    """What it cannot do, and what the router does instead; no flag changes that."""


async def check_worker(
    backend: WorkerEndpoint, client: httpx.AsyncClient, wanted: RouterNeeds, *, generate: bool
) -> WorkerCheck:
    """Ask a worker about itself.

    `generate`: also have it answer a prompt, twice, by one token each, to see what its usage tells. That is a load on
    it, if a small one, and leaves some hundred tokens in its cache.
    """
    try:
        body = await _get(backend, client, MODELS_PATH)
        models = sorted(read_models(body))
        dialect = detect_dialect(body)
        page = await _page(backend, client, dialect.info_path)
        try:
            about = EngineInfo() if page is None else read_engine_info(page)
        except WorkerBroke as error:
            return WorkerCheck(backend.id, "", [_nonsense(backend, f"{dialect.info_path}", error)])
        generate = generate and bool(models) and not (about.disaggregated or about.embeds)
        usage = await _usage(backend, client, models[0]) if generate else None
        # Only now, because SGLang's metrics tell of its cache from the first prompt on.
        answers = WorkerAnswers(dialect, await _page(backend, client, dialect.cache_path), page, usage)
        fields = AcceptedFields(dialect.name, about.version)
        if generate:
            await _try_fields(backend, client, models[0], fields)
    except (httpx.HTTPError, WorkerBroke) as error:
        return WorkerCheck(backend.id, "", [_unanswered(backend, error)])
    sizes = cache_sizes(answers)
    told = [" ".join([dialect.name, about.version or "of unknown version", "serves", ", ".join(models) or "no model"])]
    if sizes.kv_tokens is not None:
        told.append(f"its cache holds {sizes.kv_tokens} tokens")
    if sizes.block_tokens is not None:
        told.append(f"in blocks of {sizes.block_tokens}")
    return WorkerCheck(backend.id, ", ".join(told), findings(answers, wanted), [*_notes(fields)])


def _unanswered(backend: WorkerEndpoint, error: Exception) -> Finding:
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
        return Finding("does not let the router in", "give its key as worker_api_key, or as api_key under worker")
    why = str(error) or type(error).__name__
    return Finding(f"does not answer at {backend.url} ({why})", "start it, or correct its URL")


def _nonsense(backend: WorkerEndpoint, path: str, error: WorkerBroke) -> Finding:
    seen = f"answers {path} at {backend.url} with something else than an engine of its kind does ({error})"
    return Finding(seen, "see whether another server, or a proxy, answers there")


async def _get(backend: WorkerEndpoint, client: httpx.AsyncClient, path: str) -> bytes:
    return await fetch(client, backend.url + path, backend.authorization)


async def _page(backend: WorkerEndpoint, client: httpx.AsyncClient, path: str | None) -> bytes | None:
    """What is there, or None where nothing is."""
    if path is None:
        return None
    try:
        return await _get(backend, client, path)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise
        return None


async def _usage(backend: WorkerEndpoint, client: httpx.AsyncClient, model: str) -> object:
    """The usage of a prompt that it has seen before; None where it does not complete texts."""
    post = orjson.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1})
    headers = {"content-type": "application/json", **backend.authorization}
    answer: Any = None
    try:
        for _ in range(2):
            answer = orjson.loads(await fetch(client, backend.url + COMPLETIONS, headers, post=post))
    except (httpx.HTTPStatusError, orjson.JSONDecodeError):
        return None
    return answer.get("usage") if isinstance(answer, dict) else None


async def _try_fields(backend: WorkerEndpoint, client: httpx.AsyncClient, model: str, fields: AcceptedFields) -> None:
    """Send a streamed call of each kind with what the router adds, and take note of what is refused."""
    headers = {"content-type": "application/json", **backend.authorization}
    for path, asked in STREAMS.items():
        body = orjson.dumps({"model": model, "max_tokens": 1, "stream": True, **asked})
        for _ in Addition:
            post = Additions().put(body, fields[path])
            reply = await fetch_any_status(client, backend.url + path, headers, post=post)
            refused = (
                fields_named_in(reply.body, fields[path]) if reply.response.status_code in BAD_REQUEST else NO_FIELDS
            )
            if not refused:
                break
            fields.refuse(path, refused)


def _notes(fields: AcceptedFields) -> Iterator[str]:
    for path, missing in fields.missing.items():
        for field in sorted(missing, key=lambda each: each.value):
            verb = "refuses" if field in fields.refused.get(path, NO_FIELDS) else "does not accept"
            yield f"{verb} {field.value} on {path}, which is not added there: {EFFECT_OF_MISSING[field]}"


async def check_workers(backends: Sequence[WorkerEndpoint], wanted: RouterNeeds) -> list[WorkerCheck]:
    """All of them at once, each with a prompt."""
    client = polling_client()
    try:
        asked = [check_worker(backend, client, wanted, generate=True) for backend in backends]
        return list(await asyncio.gather(*asked))
    finally:
        await client.aclose()


class FlagWarnings:
    """Observer: examines each worker when it joins for the first time, and warns of what does not fit.

    No prompt is sent for that: whether answers tell what was cached is seen by the first of them.
    """

    event_types: ClassVar[Collection[type[Event]]] = (WorkerJoined,)

    def __init__(self, fleet: WorkerDirectory, wanted: RouterNeeds) -> None:
        self._directory = fleet
        self._wanted = wanted
        self._warned: dict[WorkerId, Sequence[Finding]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """From now on workers are examined."""
        self._client = polling_client()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - see `Observer`
        """See the class."""
        if isinstance(event, WorkerJoined):
            task = asyncio.create_task(self._check(self._directory[event.worker.id]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _check(self, backend: WorkerEndpoint) -> None:
        """Warn of what is other than the last time."""
        examined = await check_worker(backend, self._client, self._wanted, generate=False)
        if not examined.card or examined.findings == self._warned.get(backend.id, []):
            return
        self._warned = {known.id: told for known in self._directory.endpoints if (told := self._warned.get(known.id))}
        self._warned[backend.id] = examined.findings
        for seen, change in examined.findings:
            log.warning("worker %s %s; %s", backend.id, seen, change)
