"""vLLM's wire format: `vllm/entrypoints/openai`, as seen on 0.32. PURE.

The role chunks come with the first token, and the finish reason with the last token's chunk. Usage per chunk also needs
include_usage and counts one choice; only the last usage has the cached tokens. The fingerprint comes with the last
usage, or, if no usage was requested, with the last chunk of each choice. Emulates --enable-prompt-tokens-details, or
where `block_size` is None its absence.

Left out: log probabilities, stop strings, tool and reasoning parsers, the system fingerprint's real value.
"""

from collections.abc import Sequence
from typing import Final
from uuid import uuid4

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.api.dialect import DONE, FINISH, Answer, StreamWriter, now_seconds, usage_totals
from workers.dialects.refusals import refuse_for_vllm

FINGERPRINT: Final = "vllm-emulated"
UNSET: Final = dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
MARK: Final = b',"system_fingerprint":"%b"' % FINGERPRINT.encode()


def _usage_bytes(choice: Choice, more: bytes = b"") -> bytes:
    prompt, completion = len(choice.prompt), choice.completion_tokens
    return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (
        prompt,
        prompt + completion,
        completion,
        more,
    )


def _chat_usage_bytes(choice: Choice) -> bytes:
    return _usage_bytes(choice, b',"completion_tokens_details":null')


def _ids(tokens: list[int] | None) -> bytes:
    return b"null" if tokens is None else orjson.dumps(tokens)


class _Writer:
    """What chat and completion streams share: the last usage chunk."""

    def __init__(self, answer: Answer, kind: str, block_size: int | None) -> None:
        self._call = answer.call
        self._opening = answer.opening(kind)
        self._block_size = block_size
        self._continuous = answer.call.include_usage and answer.call.continuous_usage

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = orjson.dumps(_usage(self._call, choices, self._block_size))
        return self._opening + b'],"usage":%b%b}\n\n' % (usage, MARK) + DONE

    def _mark(self, choice: Choice) -> bytes:
        """Return the fingerprint if this chunk is the last of its choice and no usage chunk follows."""
        return MARK if choice.finish and not self._call.include_usage else b""


class ChatWriter(_Writer):
    def __init__(self, answer: Answer, block_size: int | None) -> None:
        super().__init__(answer, "chat.completion.chunk", block_size)
        self._roles_sent = False

    def update(self, choice: Choice) -> bytes:
        ids = choice.token_ids if self._call.return_token_ids else None
        rest = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b%b}]%b%b}\n\n' % (
            choice.index,
            orjson.dumps(choice.text),
            FINISH[choice.finish],
            (b',"stop_reason":null,"token_ids":' if choice.finish else b',"token_ids":') + _ids(ids),
            _chat_usage_bytes(choice) if self._continuous else b"",
            self._mark(choice),
        )
        event = self._opening + rest
        return event if self._roles_sent else self._roles(choice) + event

    def _roles(self, first: Choice) -> bytes:
        """Return a role chunk for every choice, sent as soon as one of them has its first token."""
        self._roles_sent = True
        usage = _chat_usage_bytes(Choice(0, first.prompt)) if self._continuous else b""
        ids = _ids(first.prompt if self._call.return_token_ids else None)
        return b"".join(
            self._opening + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n' % (index, usage, ids)
            for index in range(self._call.n)
        )


class CompletionWriter(_Writer):
    def __init__(self, answer: Answer, block_size: int | None) -> None:
        super().__init__(answer, "text_completion", block_size)

    def update(self, choice: Choice) -> bytes:
        wanted = self._call.return_token_ids
        return (
            self._opening + b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,'
            b'"prompt_token_ids":%b,"token_ids":%b}]%b%b}\n\n'
            % (
                choice.index,
                orjson.dumps(choice.text),
                FINISH[choice.finish],
                _ids(choice.prompt if wanted and not choice.sent else None),
                _ids(choice.token_ids if wanted else None),
                _usage_bytes(choice) if self._continuous else b"",
                self._mark(choice),
            )
        )


class VllmWire:
    """The generation endpoints of a vLLM server with one model."""

    disconnect_poll = 0.0
    headers_at_once = True
    queue_full_in_band = False

    def __init__(self, model: str, max_model_len: int, block_size: int | None) -> None:
        """`block_size`: None if usage does not say what was cached."""
        self._model = model
        self._max_model_len = max_model_len
        self._block_size = block_size

    def check(self, body: Body, path: str) -> None:
        refuse_for_vllm(body, path)

    def answer(self, call: Call, request_id: str | None) -> Answer:
        if call.model is not None and call.model != self._model:
            message = f"The model `{call.model}` does not exist. Valid aliases: {self._model}."
            raise ApiError(404, message, "NotFoundError", "model")
        kind = "chatcmpl" if call.chat else "cmpl"
        return Answer(call, f"{kind}-{request_id or uuid4().hex}", self._model, now_seconds())

    def max_tokens(self, call: Call, prompt: Sequence[int]) -> int:
        """Clamp the answer to what the context leaves; only a `max_tokens` beyond the whole context is an error."""
        limit = self._max_model_len
        if len(prompt) >= limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, your request has {len(prompt)} input "
                "tokens. Please reduce the length of the input messages."
            )
            raise ApiError(400, message, param="input_tokens")
        if call.max_tokens is not None and call.max_tokens > limit:
            message = f"max_tokens={call.max_tokens} cannot be greater than max_model_len={limit}."
            raise ApiError(400, message, param="max_tokens")
        return min(call.max_tokens or limit, limit - len(prompt))

    def writer(self, answer: Answer) -> StreamWriter:
        kind = ChatWriter if answer.call.chat else CompletionWriter
        return kind(answer, self._block_size)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        call = answer.call
        body: dict[str, object] = {
            "id": answer.id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [(_chat_choice if call.chat else _text_choice)(choice, call) for choice in choices],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _whole_usage(call, choices, self._block_size),
            **UNSET,
            "kv_transfer_params": choices[0].transfer,
        }
        if call.chat:
            body |= {"prompt_logprobs": None, "prompt_text": None}
            body["prompt_token_ids"] = choices[0].prompt if call.return_token_ids else None
        return orjson.dumps(body)

    def error(self, error: ApiError) -> bytes:
        detail = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
        return orjson.dumps({"error": detail})

    def stream_error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % self.error(error)


def _usage(call: Call, choices: Sequence[Choice], block_size: int | None) -> dict[str, object]:
    """Return the usage at the end of a stream."""
    prompt, completion, cached = usage_totals(choices, call.n)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if block_size is None:
        return usage
    details = {"cached_tokens": cached}
    if call.chat:
        own = [choice for choice in choices[:: call.n] if not choice.pulled]
        full_blocks = sum(len(choice.prompt) // block_size * block_size for choice in own)
        details["created_cache_tokens"] = max(0, full_blocks - cached)
    return usage | {"prompt_tokens_details": details}


def _whole_usage(call: Call, choices: Sequence[Choice], block_size: int | None) -> dict[str, object]:
    """Return the usage of a whole answer, which writes out fields that are not set."""
    usage = _usage(call, choices, block_size)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        details = {**dict.fromkeys(("created_cache_tokens", "multimodal_tokens")), **details}
    return usage | {"prompt_tokens_details": details, "completion_tokens_details": None}


def _chat_choice(choice: Choice, call: Call) -> dict[str, object]:
    message = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": None, "audio": None}
    return {
        "index": choice.index,
        "message": message | {"function_call": None, "reasoning": None},
        "logprobs": None,
        "finish_reason": choice.finish,
        "stop_reason": None,
        "token_ids": choice.token_ids if call.return_token_ids else None,
        "routed_experts": None,
    }


def _text_choice(choice: Choice, call: Call) -> dict[str, object]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish,
        "stop_reason": None,
        "token_ids": choice.token_ids if call.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt if call.return_token_ids else None,
        "routed_experts": None,
    }
