"""Embeddings and scores: the prompts are computed, and answered by numbers that mean nothing here. PURE."""

import base64
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Final, Protocol
from uuid import uuid4

import orjson

from workers.api.call import ApiError, Body, prompt_list
from workers.api.choice import Choice
from workers.api.dialect import now_seconds
from workers.engine.model import Dialect
from workers.engine.tokenizer import encode

DIMENSIONS: Final = 8


class Pooled(Protocol):
    """One endpoint for embeddings or scores."""

    def prompts(self, body: Body) -> list[list[int]]:
        """Return the token ids of each prompt. Raises ApiError if the body is invalid."""

    def answer(self, body: Body, model: str, choices: Sequence[Choice]) -> bytes: ...


class Embeddings:
    """POST /v1/embeddings."""

    def prompts(self, body: Body) -> list[list[int]]:
        return prompt_list(body.get("input"))

    def answer(self, body: Body, model: str, choices: Sequence[Choice]) -> bytes:
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(choice, body.get("encoding_format"))}
            for index, choice in enumerate(choices)
        ]
        return orjson.dumps(_listed("embd", model) | {"data": data, "usage": _usage(choices)})


class Score:
    """POST /v1/score."""

    def prompts(self, body: Body) -> list[list[int]]:
        ones, others = _texts(body.get("text_1"), "text_1"), _texts(body.get("text_2"), "text_2")
        pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=False)
        return [encode(one + other) for one, other in pairs]

    def answer(self, body: Body, model: str, choices: Sequence[Choice]) -> bytes:  # noqa: ARG002 - part of Pooled
        data = [
            {"index": index, "object": "score", "score": _numbers(choice)[0]} for index, choice in enumerate(choices)
        ]
        return orjson.dumps(_listed("score", model) | {"data": data, "usage": _usage(choices)})


class Rerank:
    """POST /v1/rerank."""

    def prompts(self, body: Body) -> list[list[int]]:
        (query,) = _texts(body.get("query"), "query")
        return [encode(query + document) for document in _texts(body.get("documents"), "documents")]

    def answer(self, body: Body, model: str, choices: Sequence[Choice]) -> bytes:
        documents = _texts(body.get("documents"), "documents")
        results = [
            {"index": index, "document": {"text": documents[index]}, "relevance_score": _numbers(choice)[0]}
            for index, choice in enumerate(choices)
        ]
        results.sort(key=lambda result: str(result["relevance_score"]), reverse=True)
        usage = {name: count for name, count in _usage(choices).items() if name != "completion_tokens"}
        return orjson.dumps({"id": f"rerank-{uuid4().hex}", "model": model, "usage": usage, "results": results})


SGLANG_POOLED: Mapping[str, Pooled] = {"/v1/embeddings": Embeddings(), "/v1/score": Score(), "/v1/rerank": Rerank()}
POOLED: Mapping[Dialect, Mapping[str, Pooled]] = {
    "sglang": SGLANG_POOLED,
    "vllm": {**SGLANG_POOLED, "/score": Score(), **dict.fromkeys(("/rerank", "/v2/rerank"), Rerank())},
}
"""The endpoints by path. A real engine serves them only if its model is made for them, and then generates nothing."""


def _texts(value: object, field: str) -> list[str]:
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [text for text in texts if isinstance(text, str) and text]
    if not found or len(found) < len(parts):
        raise ApiError(400, f"Input should be a text or a list of texts: {field}", param=field)
    return found


def _listed(kind: str, model: str) -> dict[str, object]:
    return {"id": f"{kind}-{uuid4().hex}", "object": "list", "created": now_seconds(), "model": model}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    tokens = sum(len(choice.prompt) for choice in choices)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def _numbers(choice: Choice) -> list[float]:
    digest = hashlib.blake2b(struct.pack(f"<{len(choice.prompt)}Q", *choice.prompt), digest_size=DIMENSIONS).digest()
    return [byte / 256 for byte in digest]


def _embedding(choice: Choice, encoding: object) -> list[float] | str:
    numbers = _numbers(choice)
    if encoding != "base64":
        return numbers
    return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *numbers)).decode()
