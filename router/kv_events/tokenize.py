"""The token ids of a call's prompts, as its engine will make them, and from them the call's keys in blocks.

Ids come with the call, from a tokenizer here (`local_tokenizer`), or from a worker's own /tokenize. Whatever takes long
is done off the event loop and within a budget; a call whose ids are not there by then goes without them, and is matched
by its bytes. Where an engine counts a model's prompts differently, again and again, the model's ids come from its
workers instead of from here, and if that is no better, from nowhere.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum, StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self, TypeVar

import httpx
import orjson

from router.core.model.block_key import BlockHasher, BlockKey
from router.core.model.commands import Command
from router.core.model.events import Arrived, Cancelled, Event, Failed, Finished
from router.core.model.request import RequestId
from router.errors import WorkerBroke
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.poll_client import fetch, polling_client

log = logging.getLogger(__name__)

T = TypeVar("T")

KEYS_KEPT: Final = 4096
"""Calls whose keys are kept, for others with the same body."""
MAX_CONCURRENT: Final = 64
"""Calls in work; more go without."""
MAX_MISCOUNTS: Final = 5
"""Prompts in a row that an engine counted differently, after which its model's ids are no longer used."""
UNSUPPORTED_FIELDS: Final = frozenset(
    {"cache_salt", "extra_key", "lora_path", "truncate_prompt_tokens", "suffix", "documents", "reasoning_effort"}
    | {"mm_processor_kwargs", "prompt_embeds", "functions", "continue_final_message"}
)
"""Body members that make another prompt, or another cache, of the same text."""
TEMPLATE_FIELDS: Final = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens")
"""Body members that a worker's /tokenize takes beside the messages."""


class TokenizeOutcome(StrEnum):
    """What came of a call's tokens, as it is counted."""

    KNOWN = "known"
    DECLINED = "declined"
    """Of a kind that nobody here can tokenise as its engine does."""
    SLOW = "slow"
    BUSY = "busy"
    FAILED = "failed"
    DISTRUSTED = "distrusted"


class Tokenizer(Protocol):
    """See `local_tokenizer.LocalTokenizer`."""

    def text(self, prompt: str, special: bool) -> list[int]:
        """Token ids of a plain text."""

    def chat(self, messages: object, more: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a chat; None where it is declined."""


class TokenSource(IntEnum):
    """Who tells the token ids of a model, while nobody before it is found wrong."""

    HERE = 0
    WORKER = 1
    NOBODY = 2


class CallKey(NamedTuple):
    """What tells calls with other keys apart."""

    body: bytes
    """Its digest."""
    chat: bool
    sizes: frozenset[int]
    source: TokenSource


class Declined(Exception):
    """Nobody here knows the token ids of this call."""


class PromptTokenizer:
    """Gives each call its keys; as an observer, compares the engine's count of tokens with its own."""

    event_types: ClassVar[Collection[type[Event]]] = (Arrived, Finished, Failed, Cancelled)

    def __init__(
        self,
        fleet: WorkerDirectory,
        hasher: BlockHasher,
        sizes: Callable[[str], Collection[int]],
        tokenizer: Tokenizer | None,
        budget: float,
    ) -> None:
        """`sizes`: the block sizes in which a model's keys are wanted; none, and nothing is done. `budget`: seconds."""
        self.outcomes: Counter[TokenizeOutcome] = Counter()
        self._fleet = fleet
        self._hasher = hasher
        self._sizes = sizes
        self._tokenizer = tokenizer
        self._budget = budget
        self._known: OrderedDict[CallKey, tuple[BlockKey, ...]] = OrderedDict()
        self._running: set[asyncio.Task[tuple[BlockKey, ...]]] = set()
        self._counted: dict[RequestId, tuple[str, int, TokenSource]] = {}
        self._tellers: dict[str, TokenSource] = {}
        """Of the models whose teller is not the first any more."""
        self._wrong: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(2, "tokens")
        self._client = polling_client()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give up what is in work."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._client.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def keys(self, path: str, body: bytes, model: str) -> tuple[BlockKey, ...]:
        """One key per prompt of a call; none where they are not wanted, or not there in time."""
        sizes = frozenset(self._sizes(model))
        if not sizes:
            return ()
        teller = self._teller(model)
        if teller is TokenSource.NOBODY:
            self.outcomes[TokenizeOutcome.DISTRUSTED] += 1
            return ()
        name = CallKey(blake2b(body, digest_size=16).digest(), path.endswith("/chat/completions"), sizes, teller)
        keys = self._known.get(name)
        if keys is None:
            keys = await self._in_time(body, model, name)
        else:
            self._known.move_to_end(name)
        return keys

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - counts alone
        """See `Observer`."""
        match event:
            case Arrived(request):
                if request.blocks:
                    tokens = sum(key.tokens for key in request.blocks)
                    self._counted[request.id] = request.model, tokens, self._teller(request.model)
            case Finished(request_id, usage):
                counted = self._counted.pop(request_id, None)
                if counted is not None and usage is not None:
                    self._compare(*counted, usage.input_tokens)
            case Failed(request_id) | Cancelled(request_id):
                self._counted.pop(request_id, None)

    def _teller(self, model: str) -> TokenSource:
        return self._tellers.get(model, TokenSource.WORKER if self._tokenizer is None else TokenSource.HERE)

    def _compare(self, model: str, ours: int, teller: TokenSource, engines: int) -> None:
        if teller is not self._teller(model):
            return
        self._wrong[model] = 0 if ours == engines else self._wrong[model] + 1
        if self._wrong[model] == MAX_MISCOUNTS:
            self._wrong[model] = 0
            self._tellers[model] = TokenSource(teller + 1)
            instead = (
                "its workers are asked" if teller is TokenSource.HERE else "its requests are matched by their bytes"
            )
            log.warning(
                "model %s: %d prompts in a row have other numbers of tokens for its engine (%d, not %d, the last): "
                "is it another tokenizer? From now on %s",
                *(model, MAX_MISCOUNTS, engines, ours, instead),
            )

    async def _in_time(self, body: bytes, model: str, name: CallKey) -> tuple[BlockKey, ...]:
        if len(self._running) >= MAX_CONCURRENT:
            self.outcomes[TokenizeOutcome.BUSY] += 1
            return ()
        task = asyncio.create_task(self._find(body, model, name))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait({task}, timeout=self._budget)
        if not done:
            self.outcomes[TokenizeOutcome.SLOW] += 1
            return ()
        return task.result()

    async def _find(self, body: bytes, model: str, name: CallKey) -> tuple[BlockKey, ...]:
        """Find the keys of a call and keep them."""
        try:
            keys = await self._tokenise(body, model, name)
        except Declined:
            outcome, keys = TokenizeOutcome.DECLINED, ()
        except (httpx.HTTPError, WorkerBroke, ValueError, TypeError, LookupError) as error:
            log.debug("the tokens of a call are not known: %s", error)
            outcome, keys = TokenizeOutcome.FAILED, ()
        else:
            outcome = TokenizeOutcome.KNOWN
            self._known[name] = keys
            if len(self._known) > KEYS_KEPT:
                self._known.popitem(last=False)
        self.outcomes[outcome] += 1
        return keys

    async def _tokenise(self, body: bytes, model: str, name: CallKey) -> tuple[BlockKey, ...]:
        if self._is_adapter(model):
            raise Declined
        fields, ids = await self._off_loop(partial(self._local, body, name))
        if ids is None:
            ids = [await self._ask(question, model) for question in _questions(fields, name.chat)]
        return await self._off_loop(partial(self._hash, ids, name.sizes))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _hash(self, ids: Sequence[Sequence[int]], sizes: frozenset[int]) -> tuple[BlockKey, ...]:
        return tuple(self._hasher.key(each, sizes) for each in ids)

    def _local(self, body: bytes, name: CallKey) -> tuple[Mapping[str, Any], list[list[int]] | None]:
        """The call's members, and the ids of each prompt, where they can be had here. Raises Declined."""
        fields = orjson.loads(body)
        if not isinstance(fields, dict) or any(fields.get(member) for member in UNSUPPORTED_FIELDS):
            raise Declined
        tokenizer = self._tokenizer if name.source is TokenSource.HERE else None
        return fields, _chat(fields, tokenizer) if name.chat else _texts(fields, tokenizer)

    def _is_adapter(self, model: str) -> bool:
        """Whether a model is one on another: its engine keeps its blocks apart from those."""
        return any(model in backend.parents for backend in self._fleet.endpoints)

    async def _ask(self, question: Mapping[str, Any], model: str) -> list[int]:
        """The token ids that the /tokenize of a worker with this model gives.

        Raises Declined where there is none, or it does not know the question.
        """
        backend = next(self._able(model), None)
        if backend is None:
            raise Declined
        headers = {"content-type": "application/json", **backend.authorization}
        try:
            answer = await fetch(self._client, backend.url + "/tokenize", headers, post=orjson.dumps(question))
        except httpx.HTTPStatusError as error:
            if error.response.is_client_error:
                raise Declined from None
            raise
        ids = orjson.loads(answer)["tokens"]
        if not isinstance(ids, list):
            raise ValueError("no token ids")
        return ids

    def _able(self, model: str) -> Iterator[WorkerEndpoint]:
        return (backend for backend in self._fleet.endpoints if backend.healthy and model in backend.models)


def _chat(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """The ids of a chat, where they can be had here."""
    if tokenizer is None or any(fields.get(name) for name in ("tools", "chat_template", "add_special_tokens")):
        return None
    more = fields.get("chat_template_kwargs") or {}
    if "add_generation_prompt" in fields:
        more = {**more, "add_generation_prompt": fields["add_generation_prompt"]}
    ids = tokenizer.chat(fields["messages"], more)
    return None if ids is None else [ids]


def _texts(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """The ids of each prompt of a completions call, where they come with it or can be had here."""
    prompts = _prompts(fields)
    if all(isinstance(prompt, list) for prompt in prompts):
        return prompts
    if tokenizer is None or not all(isinstance(prompt, str) for prompt in prompts):
        return None
    return [tokenizer.text(prompt, fields.get("add_special_tokens", True)) for prompt in prompts]


def _prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Each prompt of a completions call: texts or lists of ids."""
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return list(prompt) if several and prompt else [prompt]


def _questions(fields: Mapping[str, Any], chat: bool) -> list[dict[str, Any]]:
    """What to ask a worker's /tokenize about a call."""
    model = {"model": fields.get("model")}
    if chat:
        more = {name: fields[name] for name in TEMPLATE_FIELDS if name in fields}
        return [{**model, "messages": fields["messages"], **more}]
    special = {"add_special_tokens": fields.get("add_special_tokens", True)}
    return [{**model, "prompt": prompt, **special} for prompt in _prompts(fields)]
