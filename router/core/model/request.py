"""Ids, requests, workers and usage, as the core knows them.

Tokens are the engine's tokens; before the engine has reported usage they are estimates (see `token_estimates`).
"""

from dataclasses import dataclass
from typing import NewType

from router.core.model.block_key import BlockKey
from router.core.model.prompt_key import PromptKey

ClientId = NewType("ClientId", str)
GroupId = NewType("GroupId", str)
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)


@dataclass(frozen=True, slots=True)
class Request:
    """One call to a model, as the scheduler sees it: sizes and hashes, never text."""

    id: RequestId
    client: ClientId
    model: str
    prompts: tuple[PromptKey, ...]
    """One key per prompt; only a completions call with a list of prompts has several."""
    output_limit: int | None = None
    """The most output tokens it may produce over all choices and prompts; None where the client set no limit."""
    streamed: bool = True
    weight: float = 1.0
    """The client's share relative to others, or to the other members of its group; positive."""
    blocks: tuple[BlockKey, ...] = ()
    """The same prompts by their tokens, one key per prompt; none where those are not known."""
    body_bytes: int = 0
    """What it takes of the router's memory while it waits."""
    group: GroupId | None = None
    """Whose weight the client shares with others; None where it has its own."""
    group_weight: float = 1.0
    """The share of that group relative to other groups and clients; positive."""
    answers: int = 1
    """How many answers it asks for, over all prompts and choices; at least 1."""
    computed_anew_by: frozenset[str] = frozenset()
    """The engines, by their names, that compute these prompts in full, whatever their prefix caches hold.

    Where it names any, an engine of an unknown kind is taken to do the same.
    """
    worker: WorkerId | None = None
    """The only worker that may take it, since that alone keeps what it goes on from; None where any may.

    Then its prompts are a part of what the engine reads.
    """

    @property
    def route(self) -> str:
        """What a worker must have among its routes to be sent it."""
        return self.model if self.worker is None else own_route(self.worker)


def own_route(worker: WorkerId) -> str:
    """The route of requests that this worker alone may take; no model has such a name."""
    return f"\0{worker}"


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine behind one URL."""

    id: WorkerId
    models: frozenset[str]
    """Names, adapters included, that it answers to."""
    kv_tokens: int | None = None
    """Capacity of its KV cache in tokens; None where the engine does not tell."""
    reorders: bool = False
    """Whether its engine does not serve in order of arrival, but by longest match."""
    engine: str = ""
    """The kind of engine, as `cache_rules` knows it; empty where that is not known."""
    batch_tokens: int | None = None
    """The most new tokens of prompts that it computes in one step; None where it does not tell."""
    caches: bool = True
    """Whether it keeps a prefix cache; one that says in its metrics that it keeps none need not say so here."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine says that a request used, in tokens, summed over its choices and prompts."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    """Input tokens found in the prefix cache; None where the engine does not tell."""
