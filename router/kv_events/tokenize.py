"""The token ids of a call's prompts, as its engine will compute them, and from them the call's block keys.

Ids come with the call, from a tokenizer here (`local_tokenizer`), or from a worker's own /tokenize. Whatever takes long
runs outside the event loop and within a time budget. A call whose ids are not found in time has no block keys, and is
matched by its bytes. If an engine repeatedly counts a model's prompts differently, the model's ids come from its
workers instead of from here; if that is no better, they are not used at all.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self, TypeVar

import orjson

from router.channel.messages import FrontEvent
from router.core.model.block_key import BlockHasher, BlockKey
from router.core.model.events import Arrived, Cancelled, Failed, Finished
from router.core.model.request import ClientId, RequestId
from router.errors import WorkerBroke
from router.kv_events.token_sources import TokenSource, TokenSources
from router.upstream.connections import ConnectedWorker, WorkerConnections
from router.upstream.polling.poll_client import OtherStatus, PollClient

log = logging.getLogger(__name__)

T = TypeVar("T")

KEYS_KEPT: Final = 4096
"""Calls whose keys are kept, for later calls with the same body."""
MAX_CONCURRENT: Final = 64
"""Calls whose ids are looked for at the same time; further calls get no keys."""
UNSUPPORTED_FIELDS: Final = frozenset(
    {"cache_salt", "extra_key", "lora_path", "truncate_prompt_tokens", "suffix", "documents", "reasoning_effort"}
    | {"mm_processor_kwargs", "prompt_embeds", "functions", "continue_final_message"}
)
"""Body fields with which the same text makes another prompt or uses another cache."""
TEMPLATE_FIELDS: Final = (
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "add_special_tokens",
)
"""Body fields that a worker's /tokenize accepts beside the messages."""


class TokenizeOutcome(StrEnum):
    """How the search for a call's token ids ended; the values are metric labels."""

    KNOWN = "known"
    DECLINED = "declined"
    """The router cannot tokenize such a call as its engine does."""
    SLOW = "slow"
    BUSY = "busy"
    FAILED = "failed"
    DISTRUSTED = "distrusted"


class Tokenizer(Protocol):
    """Tokenizes texts and chats; implemented by `local_tokenizer.LocalTokenizer`."""

    def text(self, prompt: str, special: bool) -> list[int]:
        """Return the token ids of a plain text."""

    def chat(self, messages: object, variables: Mapping[str, Any]) -> list[int] | None:
        """Return the token ids of a chat; None if it is declined."""


class CallKey(NamedTuple):
    """Distinguishes calls with different block keys."""

    body: bytes
    """Digest of the body."""
    chat: bool
    sizes: frozenset[int]
    source: TokenSource


class Declined(Exception):
    """The token ids of this call cannot be found."""


class PromptTokenizer:
    """Finds the block keys of each call; as an observer of the front's events, compares the engine's token counts with
    its own.
    """

    sent_types: ClassVar[Collection[type[FrontEvent]]] = (Arrived, Finished, Failed, Cancelled)

    def __init__(
        self,
        connections: WorkerConnections,
        hasher: BlockHasher,
        tokenizer: Tokenizer | None,
        budget: float,
        observe_calls: Callable[[], None] = lambda: None,
    ) -> None:
        """`connections`: also say in which block sizes a model's keys are wanted; if there are none, nothing is done.

        `budget`: longest search for the keys of a call, in seconds; `observe_calls`: called when the first keys are
        found, to have `observe_sent` called from then on.
        """
        self.outcomes: Counter[TokenizeOutcome] = Counter()
        self._connections = connections
        self._hasher = hasher
        self._tokenizer = tokenizer
        self._budget = budget
        self._observe_calls = observe_calls
        self._has_found = False
        self._keys: OrderedDict[CallKey, tuple[BlockKey, ...]] = OrderedDict()
        self._tasks: set[asyncio.Task[tuple[BlockKey, ...]]] = set()
        self._expected_counts: dict[RequestId, tuple[str, ClientId, TokenSource, int]] = {}
        self._sources = TokenSources(TokenSource.WORKER if tokenizer is None else TokenSource.LOCAL)

    def outcome_counts(self) -> Mapping[str, int]:
        """Return how often the token ids of a call were looked for, by outcome."""
        return {str(outcome): count for outcome, count in self.outcomes.items()}

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(2, "tokens")
        self._client = PollClient()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel all searches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def keys(self, path: str, body: bytes, model: str, client: ClientId) -> tuple[BlockKey, ...]:
        """Return one key per prompt of a client's call; none if they are not wanted, or not found in time."""
        served = self._connections.served(model)
        if served is None or not served.block_sizes:
            return ()
        sizes = served.block_sizes
        source = self._sources.of(model, client)
        if source is TokenSource.NONE:
            self.outcomes[TokenizeOutcome.DISTRUSTED] += 1
            return ()
        key = CallKey(blake2b(body, digest_size=16).digest(), path.endswith("/chat/completions"), sizes, source)
        keys = self._keys.get(key)
        if keys is None:
            keys = await self._find_within_budget(body, model, key)
        else:
            self._keys.move_to_end(key)
        return keys

    def observe_sent(self, event: FrontEvent) -> None:
        """Compare the engine's count of a prompt with the router's own."""
        match event:
            case Arrived(request):
                if request.blocks:
                    tokens = sum(key.tokens for key in request.blocks)
                    source = self._sources.of(request.model, request.client)
                    self._expected_counts[request.id] = request.model, request.client, source, tokens
            case Finished(request_id, usage):
                expected = self._expected_counts.pop(request_id, None)
                if expected is not None and usage is not None:
                    self._sources.compare(*expected, usage.input_tokens)
            case Failed(request_id) | Cancelled(request_id):
                self._expected_counts.pop(request_id, None)

    async def _find_within_budget(self, body: bytes, model: str, key: CallKey) -> tuple[BlockKey, ...]:
        if len(self._tasks) >= MAX_CONCURRENT:
            self.outcomes[TokenizeOutcome.BUSY] += 1
            return ()
        task = asyncio.create_task(self._find_keys(body, model, key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=self._budget)
        if not done:
            self.outcomes[TokenizeOutcome.SLOW] += 1
            return ()
        return task.result()

    async def _find_keys(self, body: bytes, model: str, key: CallKey) -> tuple[BlockKey, ...]:
        """Find the keys of a call and keep them."""
        try:
            keys = await self._tokenize(body, model, key)
        except Declined:
            outcome, keys = TokenizeOutcome.DECLINED, ()
        except (WorkerBroke, ValueError, TypeError, LookupError) as error:
            log.debug("the token ids of a call cannot be found: %s", error)
            outcome, keys = TokenizeOutcome.FAILED, ()
        else:
            outcome = TokenizeOutcome.KNOWN
            if not self._has_found:
                self._has_found = True
                self._observe_calls()
            self._keys[key] = keys
            if len(self._keys) > KEYS_KEPT:
                self._keys.popitem(last=False)
        self.outcomes[outcome] += 1
        return keys

    async def _tokenize(self, body: bytes, model: str, key: CallKey) -> tuple[BlockKey, ...]:
        if self._is_adapter(model):
            raise Declined
        fields, ids = await self._in_thread(partial(self._tokenize_here, body, key))
        if ids is None:
            ids = [
                await self._ask_worker(tokenize_request, model)
                for tokenize_request in _tokenize_requests(fields, key.chat)
            ]
        return await self._in_thread(partial(self._hash_ids, ids, key.sizes))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _hash_ids(self, ids: Sequence[Sequence[int]], sizes: frozenset[int]) -> tuple[BlockKey, ...]:
        return tuple(self._hasher.key(each, sizes) for each in ids)

    def _tokenize_here(self, body: bytes, key: CallKey) -> tuple[Mapping[str, Any], list[list[int]] | None]:
        """Return the call's fields, and the ids of each prompt if they can be found here. Raises Declined."""
        fields = orjson.loads(body)
        if not isinstance(fields, dict) or any(fields.get(member) for member in UNSUPPORTED_FIELDS):
            raise Declined
        if key.chat and not all(map(_is_text, fields["messages"])):
            raise Declined
        tokenizer = self._tokenizer if key.source is TokenSource.LOCAL else None
        return fields, _chat(fields, tokenizer) if key.chat else _texts(fields, tokenizer)

    def _is_adapter(self, model: str) -> bool:
        """Return whether a model is an adapter of another model: its engine does not share blocks between the two."""
        return any(model in worker.card.parents for worker in self._connections.by_id.values())

    async def _ask_worker(self, tokenize_request: Mapping[str, Any], model: str) -> list[int]:
        """Return the token ids that the /tokenize of a worker with this model answers.

        Raises Declined if there is no such worker, or it rejects the request.
        """
        worker = next(self._workers_with(model), None)
        if worker is None:
            raise Declined
        headers = {"content-type": "application/json", **worker.authorization}
        try:
            answer = await self._client.fetch(
                worker.card.url + "/tokenize", headers, post=orjson.dumps(tokenize_request)
            )
        except OtherStatus as error:
            if error.answered // 100 == 4:
                raise Declined from None
            raise
        ids = orjson.loads(answer)["tokens"]
        if not isinstance(ids, list):
            raise ValueError("no token ids")
        return ids

    def _workers_with(self, model: str) -> Iterator[ConnectedWorker]:
        return (
            worker for worker in self._connections.by_id.values() if worker.card.healthy and model in worker.card.models
        )


def _is_text(message: Any) -> bool:
    """Return whether a message has nothing but text. Media have the same tokens whatever they show, and blocks of their
    own: such a chat is matched by its bytes.
    """
    parts = message["content"] if isinstance(message, dict) and isinstance(message.get("content"), list) else ()
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts)


def _chat(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """Return the ids of a chat if they can be found here."""
    if tokenizer is None or any(fields.get(name) for name in ("tools", "chat_template", "add_special_tokens")):
        return None
    variables = fields.get("chat_template_kwargs") or {}
    if "add_generation_prompt" in fields:
        variables = {**variables, "add_generation_prompt": fields["add_generation_prompt"]}
    ids = tokenizer.chat(fields["messages"], variables)
    return None if ids is None else [ids]


def _texts(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """Return the ids of each prompt of a completions call, if they come with the call or can be found here."""
    prompts = _prompts(fields)
    if all(isinstance(prompt, list) for prompt in prompts):
        return prompts
    if tokenizer is None or not all(isinstance(prompt, str) for prompt in prompts):
        return None
    return [tokenizer.text(prompt, fields.get("add_special_tokens", True)) for prompt in prompts]


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Return each prompt of a completions call: texts or lists of ids."""
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return list(prompt) if several and prompt else [prompt]


def _tokenize_requests(fields: Mapping[str, Any], chat: bool) -> list[dict[str, Any]]:
    """Return the bodies with which to ask a worker's /tokenize about a call."""
    model = {"model": fields.get("model")}
    if chat:
        variables = {name: fields[name] for name in TEMPLATE_FIELDS if name in fields}
        return [{**model, "messages": fields["messages"], **variables}]
    special = {"add_special_tokens": fields.get("add_special_tokens", True)}
    return [{**model, "prompt": prompt, **special} for prompt in _prompts(fields)]
