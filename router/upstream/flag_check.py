"""Checks the flags of workers: for `d2lpm check`, and with a log warning for each worker that joins."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

import orjson

from router.api.body.call import COMPLETIONS
from router.api.body.edits import NO_FIELDS, Addition, Additions, fields_named_in
from router.api.endpoints.chat import PATH as CHAT
from router.core.model.commands import Command
from router.core.model.events import Event, WorkerJoined
from router.core.model.request import Role, Takes, Worker, WorkerId
from router.errors import WorkerBroke
from router.upstream.accepted_fields import BAD_REQUEST, AcceptedFields
from router.upstream.dialects import (
    MODELS_PATH,
    EngineInfo,
    detect_dialect,
    read_engine_info,
    read_models,
    reported_ranks,
)
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.flag_rules import (
    Finding,
    RouterNeeds,
    WorkerAnswers,
    WorkerPart,
    cache_sizes,
    connector_of,
    findings,
    handoff_findings,
    role_finding,
)
from router.upstream.polling.poll_client import OtherStatus, PollClient
from router.upstream.ranks.rank_rules import RankRules

log = logging.getLogger(__name__)

PROMPT: Final = "The same words, again and again, so that the second time some of them are in the cache. " * 16
"""A few hundred tokens: more than a KV block of any engine."""
STREAMS: Final[Mapping[str, Mapping[str, object]]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
"""The fields of a short call, by path."""
EFFECT_OF_MISSING: Final = {
    Addition.USAGE: "clients are charged by predicted tokens and by the chunks of their answers",
    Addition.CHUNK_USAGE: "until an answer ends, its output is counted by its chunks",
    Addition.TOKEN_IDS: "if it dies during a stream, another worker continues from the text, not from the tokens",
}
"""The consequence for the router if a field is not added."""


class WorkerCheck(NamedTuple):
    """The result of checking one worker."""

    worker: WorkerId
    card: str
    """Its engine, version, models and cache size in one line; empty if it does not answer."""
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    """What it cannot do and what the router does instead; no flag changes that."""
    part: WorkerPart = WorkerPart()


async def check_worker(
    endpoint: WorkerEndpoint, client: PollClient, needs: RouterNeeds, *, generate: bool
) -> WorkerCheck:
    """Check one worker's flags by what it reports about itself.

    `generate`: also send it a prompt twice, for one token each, to see what its usage reports. This is a small load
    and leaves a few hundred tokens in its cache.
    """
    try:
        body = await _get(endpoint, client, MODELS_PATH)
        models = sorted(read_models(body))
        dialect = detect_dialect(body)
        page = await _page(endpoint, client, dialect.info_path)
        try:
            info = EngineInfo() if page is None else read_engine_info(page)
        except WorkerBroke as error:
            return WorkerCheck(endpoint.id, "", [_nonsense(endpoint, f"{dialect.info_path}", error)])
        role = endpoint.named_role if info.role is Role.BOTH else info.role
        generate = generate and bool(models) and not info.embeds and role is Role.BOTH
        usage = await _usage(endpoint, client, models[0]) if generate else None
        # After the prompts, because SGLang's cache metrics appear with the first prompt.
        answers = WorkerAnswers(dialect, await _page(endpoint, client, dialect.cache_path), page, usage)
        fields = AcceptedFields(dialect.name, info.version)
        if generate:
            await _try_fields(endpoint, client, models[0], fields)
    except WorkerBroke as error:
        return WorkerCheck(endpoint.id, "", [_unanswered(endpoint, error)])
    sizes = cache_sizes(answers)
    connector = connector_of(role, dialect, endpoint.named_connector)
    card = [" ".join([dialect.name, info.version or "of unknown version", "serves", ", ".join(models) or "no model"])]
    if connector is not None:
        card.append(f"its role is {role}, its connector {connector}")
    if sizes.kv_tokens is not None:
        card.append(f"its cache holds {sizes.kv_tokens} tokens")
    if sizes.block_tokens is not None:
        card.append(f"in blocks of {sizes.block_tokens}")
    found = [*findings(answers, needs), *handoff_findings(role, endpoint.named_connector, answers, needs)]
    if (unfit := role_finding(endpoint.named_role, dialect, info)) is not None:
        found.append(unfit)
    if endpoint.rank is None and (reported := _reported_ranks(answers, info)) is not None:
        card += _ranks(endpoint, info, reported, needs.ranks)
        if missing := needs.ranks.out_of_range(reported):
            seen = f"has no rank {', '.join(map(str, sorted(missing)))}"
            found.append(Finding(seen, "correct ranks, or start it with more"))
    return WorkerCheck(
        endpoint.id, ", ".join(card), found, [*_notes(fields)], WorkerPart(role, connector, frozenset(models))
    )


def _reported_ranks(answers: WorkerAnswers, info: EngineInfo) -> frozenset[int] | None:
    label = answers.dialect.rank_label
    if info.ranks is not None or answers.metrics is None or not label:
        return info.ranks
    return reported_ranks(answers.metrics, label)


def _ranks(endpoint: WorkerEndpoint, info: EngineInfo, reported: frozenset[int], rules: RankRules) -> list[str]:
    """Return what the card says about the ranks; nothing of a single one."""
    if len(reported) < 2:
        return []
    used = rules.used(reported)
    card = [
        f"it has {len(reported)} ranks, {'each a worker' if used == reported else f'of which {len(used)} are used'}"
    ]
    if used:
        barrier = rules.barrier_of(endpoint.id, endpoint.group, several=True, lockstep=info.lockstep)
        card.append("which wait for no other" if barrier is None else f"which step together in group {barrier}")
    return card


def _unanswered(endpoint: WorkerEndpoint, error: Exception) -> Finding:
    if isinstance(error, OtherStatus) and error.answered in (401, 403):
        return Finding("rejects the router's key", "give its key as worker_api_key, or as api_key under worker")
    why = str(error) or type(error).__name__
    if isinstance(error, OtherStatus):
        return Finding(f"does not answer as an engine at {endpoint.url} ({why})", "let it start, or correct its URL")
    return Finding(f"does not answer at {endpoint.url} ({why})", "start it, or correct its URL")


def _nonsense(endpoint: WorkerEndpoint, path: str, error: WorkerBroke) -> Finding:
    seen = f"answers {path} at {endpoint.url} unlike an engine of its kind ({error})"
    return Finding(seen, "check whether another server, or a proxy, answers there")


async def _get(endpoint: WorkerEndpoint, client: PollClient, path: str) -> bytes:
    return await client.fetch(endpoint.url + path, endpoint.authorization)


async def _page(endpoint: WorkerEndpoint, client: PollClient, path: str | None) -> bytes | None:
    """Return the page at a path; None if there is none."""
    if path is None:
        return None
    try:
        return await _get(endpoint, client, path)
    except OtherStatus as error:
        if error.answered in (401, 403):
            raise
        return None


async def _usage(endpoint: WorkerEndpoint, client: PollClient, model: str) -> object:
    """Send a prompt twice and return the usage of the second answer; None if the worker does not complete text."""
    post = orjson.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1})
    headers = {"content-type": "application/json", **endpoint.authorization}
    answer: Any = None
    try:
        for _ in range(2):
            answer = orjson.loads(await client.fetch(endpoint.url + COMPLETIONS, headers, post=post))
    except (OtherStatus, orjson.JSONDecodeError):
        return None
    return answer.get("usage") if isinstance(answer, dict) else None


async def _try_fields(endpoint: WorkerEndpoint, client: PollClient, model: str, fields: AcceptedFields) -> None:
    """Send a streamed call of each kind with the fields that the router adds, and record in `fields` those refused."""
    headers = {"content-type": "application/json", **endpoint.authorization}
    for path, call in STREAMS.items():
        body = orjson.dumps({"model": model, "max_tokens": 1, "stream": True, **call})
        for _ in Addition:
            post = Additions().put(body, fields[path])
            reply = await client.fetch_any_status(endpoint.url + path, headers, post=post)
            refused = fields_named_in(reply.body, fields[path]) if reply.status in BAD_REQUEST else NO_FIELDS
            if not refused:
                break
            fields.refuse(path, refused)


def _notes(fields: AcceptedFields) -> Iterator[str]:
    for path, missing in fields.missing.items():
        for field in sorted(missing, key=lambda each: each.value):
            verb = "refuses" if field in fields.refused.get(path, NO_FIELDS) else "does not accept"
            yield f"{verb} {field.value} on {path}, so the router does not add it: {EFFECT_OF_MISSING[field]}"


async def check_workers(endpoints: Sequence[WorkerEndpoint], needs: RouterNeeds) -> list[WorkerCheck]:
    """Check all workers concurrently, each with prompts."""
    async with PollClient() as client:
        checks = [check_worker(endpoint, client, needs, generate=True) for endpoint in endpoints]
        return list(await asyncio.gather(*checks))


class FlagWarnings:
    """Observer that checks each worker when it joins, and logs a warning for each new finding.

    It sends no prompts: whether usage reports cached tokens shows in the first answer to a client.
    """

    event_types: ClassVar[Collection[type[Event]]] = (WorkerJoined,)

    def __init__(self, directory: WorkerDirectory, needs: RouterNeeds, *, balances: bool = True) -> None:
        """`balances`: whether the policy keeps the loads of ranks even, or was chosen although it does not."""
        self._balances = balances
        self._directory = directory
        self._needs = needs
        self._warned: dict[WorkerId, Sequence[Finding]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Open the client."""
        self._client = PollClient()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the checks in progress and close the client."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - see `Observer`
        """Start a check of a worker that joins."""
        if isinstance(event, WorkerJoined):
            self._advise_on_policy(event.worker)
            if event.worker.takes is Takes.PINNED:
                return  # its URL as a whole has the same flags
            task = asyncio.create_task(self._check(self._directory[event.worker.id]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _advise_on_policy(self, worker: Worker) -> None:
        """Log once that ranks step together, if the policy was chosen before that was known."""
        if worker.barrier is not None and not self._balances:
            self._balances = True
            log.warning(
                "the ranks of group %s step together, and this policy does not keep their loads even: restart the "
                "router now that they are up, or with --policy dlpm_balance",
                worker.barrier,
            )

    async def _check(self, endpoint: WorkerEndpoint) -> None:
        """Check a worker and log its findings, unless they are the same as the last time."""
        check = await check_worker(endpoint, self._client, self._needs, generate=False)
        if not check.card or check.findings == self._warned.get(endpoint.id, []):
            return
        self._warned = {known.id: found for known in self._directory.endpoints if (found := self._warned.get(known.id))}
        self._warned[endpoint.id] = check.findings
        for seen, change in check.findings:
            log.warning("worker %s %s; %s", endpoint.id, seen, change)
