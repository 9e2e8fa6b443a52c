"""Ids, requests, workers and usage, as the core knows them.

Tokens are the engine's tokens. Before the engine has reported usage they are estimates (see `token_estimates`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from router.core.model.block_key import BlockKey
from router.core.model.prompt_key import PromptKey

BarrierId = NewType("BarrierId", str)
ClientId = NewType("ClientId", str)
GroupId = NewType("GroupId", str)
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
"""A client's name of one of its sessions. Another client's session of the same name is another one."""
WorkerId = NewType("WorkerId", str)


class Role(StrEnum):
    """What a worker computes of the requests that it is sent."""

    BOTH = "both"
    """Prompts and answers."""
    PREFILL = "prefill"
    """Prompts, which it hands to decode workers."""
    DECODE = "decode"
    """Answers to prompts that a prefill worker hands over, and whole requests where there is no such worker."""


class Connector(StrEnum):
    """What carries a prompt's KV cache from a prefill to a decode worker; the engine's name where it has only one."""

    NIXL = "nixl"
    """vLLM: the prefill worker says where it keeps the prompt, and the decode worker is called then."""
    MOONCAKE = "mooncake"
    """vLLM: both are called at once, and the prefill worker sends the cache to the decode worker."""
    SGLANG = "sglang"
    """The same, but the decode worker computes no prompt itself."""

    @property
    def at_once(self) -> bool:
        """Whether both workers are called at once."""
        return self is not Connector.NIXL

    @property
    def decodes_alone(self) -> bool:
        """Whether a decode worker can compute whole requests."""
        return self is not Connector.SGLANG


class Leg(StrEnum):
    """The part of a request that one attempt computes."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """The prompt, at a prefill worker, which keeps it for a decode worker."""
    DECODE = "decode"
    """The answer, at a decode worker, which fetches the prompt's KV cache from the prefill worker."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call to a model, as the scheduler sees it: sizes and hashes, never text."""

    id: RequestId
    client: ClientId
    model: str
    prompts: tuple[PromptKey, ...]
    """One key per prompt. Only a completions call with a list of prompts has several."""
    output_limit: int | None = None
    """The most output tokens of the request over all choices and prompts; None if the client set no limit."""
    streamed: bool = True
    weight: float = 1.0
    """The client's share relative to other clients, or to the other members of its group; positive."""
    blocks: tuple[BlockKey, ...] = ()
    """The same prompts as token blocks, one key per prompt; empty if their tokens are not known."""
    body_bytes: int = 0
    """Memory of the router that the request takes while it waits."""
    group: GroupId | None = None
    """The group whose weight the client shares; None if the client has its own."""
    group_weight: float = 1.0
    """The group's share relative to other groups and to clients without a group; positive."""
    answers: int = 1
    """Number of answers that the request asks for, over all prompts and choices; at least 1."""
    computed_anew_by: frozenset[str] = frozenset()
    """Names of the engines that compute these prompts in full, whatever their prefix caches hold.

    If the set is not empty, an engine of unknown kind is assumed to do the same.
    """
    beam_search: bool = False
    """Whether its answers are beams, at an engine that searches them."""
    worker: WorkerId | None = None
    """The only worker that may serve the request, because only that worker stores the conversation it continues; None
    if any worker may.

    If set, `prompts` are only a part of what the engine reads.
    """
    in_place: bool = False
    """Whether `worker` is only where the session of the request has its place, and stores no conversation."""
    pinned: bool = True
    """Whether the call can name the data-parallel rank that serves it. Only known to be False, and only of importance,
    where the model is served by ranks behind a common URL.
    """
    whole: bool = False
    """Whether one engine must compute all of it. Only known, and only of importance, where the model is served by
    prefill and decode workers.
    """
    prefilled: bool = False
    """Whether this is the rest of a request whose prompt is prefilled, for which a decode worker is to be chosen."""
    session: SessionId | None = None
    """The agent session that the call belongs to, as its client labels it; None without a label."""
    parent: SessionId | None = None
    """The session that began this one, as the client labels it; None if it says nothing of that."""
    last_of_session: bool = False
    """Whether the client says that its session ends with this call."""
    retry_key: bytes | None = None
    """What only a repetition of the same call has, too: a digest of its Idempotency-Key, path and body. None if the
    client gave no such key."""

    @property
    def shared_route(self) -> str:
        """The route that all workers have that may serve such requests, whichever worker stores its conversation."""
        if self.prefilled:
            return decode_route(self.model)
        if not self.pinned:
            return unpinned_route(self.model)
        return whole_route(self.model) if self.whole else self.model

    @property
    def route(self) -> str:
        """The route that a worker must have to be sent this request."""
        if self.worker is None and self.pinned and not (self.whole or self.prefilled):  # so are nearly all
            return self.model
        return self.shared_route if self.worker is None else own_route(self.worker)


def is_model(route: str) -> bool:
    """Return whether a route is the name of a model, as that of most requests is."""
    return not route.startswith("\0")


def unpinned_route(model: str) -> str:
    """Return the route of requests for a model that cannot name a rank. No model has such a name."""
    return f"\0unpinned\0{model}"


def whole_route(model: str) -> str:
    """Return the route of requests for a model that one engine must compute. No model has such a name."""
    return f"\0whole\0{model}"


def decode_route(model: str) -> str:
    """Return the route of prefilled requests for a model. No model has such a name."""
    return f"\0decode\0{model}"


def own_route(worker: WorkerId) -> str:
    """Return the route of requests that only this worker may serve. No model has such a name."""
    return f"\0{worker}"


class Takes(StrEnum):
    """Which requests a worker serves, where several data-parallel ranks are behind one URL."""

    ALL = "all"
    PINNED = "pinned"
    """One of the ranks: requests that name it."""
    UNPINNED = "unpinned"
    """The URL as a whole: requests that can name no rank, so that the engine chooses one."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine: behind a URL of its own, or one of the data-parallel ranks behind a common URL."""

    id: WorkerId
    models: frozenset[str]
    """Model names that the engine answers to, including adapters."""
    kv_tokens: int | None = None
    """Capacity of the engine's KV cache in tokens; None if the engine does not report it."""
    reorders: bool = False
    """Whether the engine serves by longest prefix match instead of in order of arrival."""
    engine: str = ""
    """The kind of engine, as named in `engine_rules`; empty if not known."""
    batch_tokens: int | None = None
    """The most new prompt tokens that the engine computes in one step; None if the engine does not report it."""
    caches: bool = True
    """Whether the engine keeps a prefix cache. An engine whose metrics say that it keeps none need not be marked here.
    """
    rank: int | None = None
    """The engine's data-parallel rank, from 0; None if the URL has only one engine."""
    barrier: BarrierId | None = None
    """Workers with equal ids step together: each of their steps lasts as long as the slowest worker's. None if the
    engine waits for no other.
    """
    takes: Takes = Takes.ALL
    role: Role = Role.BOTH
    connector: Connector = Connector.NIXL
    """Only of importance with a role."""

    @property
    def hands_over_at_once(self) -> bool:
        """Whether it computes prompts for decode workers that are called at the same time."""
        return self.role is Role.PREFILL and self.connector.at_once

    @property
    def shared_routes(self) -> frozenset[str]:
        """The routes of the requests that it may be sent, as far as they are not bound to it alone."""
        if self.takes is Takes.UNPINNED:
            return frozenset() if self.role is Role.PREFILL else frozenset(map(unpinned_route, self.models))
        if self.role is Role.DECODE:
            routes = (whole_route, decode_route) if self.connector.decodes_alone else (decode_route,)
            return frozenset([route(model) for model in self.models for route in routes])
        return self.models


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that a request used by the engine's count, summed over choices and prompts."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    """Input tokens found in the prefix cache; None if the engine does not report them."""
