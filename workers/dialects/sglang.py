"""SGLang's wire format: `sglang/srt/entrypoints/openai`, as seen on 0.5.23. PURE.

Chat chunks always carry reasoning_content, a step without text yields no chunk, the finish reason has a chunk of its
own after all content, and usage per chunk works without include_usage and reports the cached tokens
(--enable-cache-report is emulated). Completions carry the finish reason on the last text chunk and write nulls out.
Errors are flat.

Left out: sglext chunks, log probabilities, stop strings, tool and reasoning parsers, the native /generate, and the
request without output by which a real server caches the prompt before it samples n > 1 answers.
"""

from collections.abc import Sequence
from http import HTTPStatus
from uuid import uuid4

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.api.dialect import DONE, FINISH, Answer, StreamWriter, now_seconds, usage_totals
from workers.dialects.refusals import RESPONSES, refuse_for_sglang
from workers.engine.tokenizer import EOS


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "reasoning_tokens": 0,
    }


def _spelt_out(usage: dict[str, object]) -> dict[str, object]:
    """Return a usage as it reads everywhere but at the end of a stream of completions."""
    return usage | {"completion_tokens_details": None}


def _matched_stop(choice: Choice) -> int | None:
    return EOS if choice.finish == "stop" else None


class _Writer:
    """What chat and completion streams share: the last usage chunk."""

    def __init__(self, answer: Answer, kind: str) -> None:
        self._call = answer.call
        self._opening = answer.opening(kind)

    def end(self, choices: Sequence[Choice]) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = _usage(*usage_totals(choices, self._call.n))
        encoded = orjson.dumps(_spelt_out(usage) if self._call.chat else usage)
        return self._opening + b'],"usage":%b}\n\n' % encoded + DONE


class ChatWriter(_Writer):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, "chat.completion.chunk")

    def update(self, choice: Choice) -> bytes:
        text = choice.text
        events = b"" if choice.sent else self._chunk(choice, b',"role":"assistant","content":""')
        if text:
            usage = b"," + self._usage(choice) if self._call.continuous_usage else b""
            events += self._chunk(choice, b',"content":' + orjson.dumps(text), usage)
        return events

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(map(self._finish, choices)) + super().end(choices)

    def _chunk(self, choice: Choice, delta: bytes, usage: bytes = b"") -> bytes:
        return (
            self._opening + b'{"index":%d,"delta":{"reasoning_content":null%b},"logprobs":null,"finish_reason":null,'
            b'"matched_stop":null}]%b}\n\n' % (choice.index, delta, usage)
        )

    def _usage(self, choice: Choice) -> bytes:
        usage = _usage(len(choice.prompt), choice.completion_tokens, choice.cached_tokens)
        return b'"usage":' + orjson.dumps(_spelt_out(usage))

    def _finish(self, choice: Choice) -> bytes:
        return (
            self._opening + b'{"index":%d,"delta":{"reasoning_content":null},"logprobs":null,"finish_reason":%b,'
            b'"matched_stop":%b}]}\n\n' % (choice.index, FINISH[choice.finish], orjson.dumps(_matched_stop(choice)))
        )


class CompletionWriter(_Writer):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, "text_completion")

    def update(self, choice: Choice) -> bytes:
        if not choice.text and choice.finish is None:
            return b""
        usage: object = None
        if self._call.continuous_usage:
            usage = _spelt_out(_usage(len(choice.prompt), choice.completion_tokens, None))
        return self._opening + b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,%b}],"usage":%b}\n\n' % (
            choice.index,
            orjson.dumps(choice.text),
            FINISH[choice.finish],
            b'"matched_stop":%b%b' % (orjson.dumps(_matched_stop(choice)), self._token_ids(choice)),
            orjson.dumps(usage),
        )

    def _token_ids(self, choice: Choice) -> bytes:
        if not self._call.return_token_ids:
            return b""
        ids = b',"token_ids":' + orjson.dumps(choice.token_ids)
        return ids if choice.sent else ids + b',"prompt_token_ids":' + orjson.dumps(choice.prompt)


class SglangWire:
    """The generation endpoints of an SGLang server with one model."""

    disconnect_poll = 4.0
    headers_at_once = False
    queue_full_in_band = True

    def __init__(self, model: str, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len

    def check(self, body: Body, path: str) -> None:
        refuse_for_sglang(body, path)
        if path == RESPONSES and body.get("model") not in (None, self._model):
            raise ApiError(404, f"The model '{body['model']}' is not served.", "invalid_request_error", "model")

    def answer(self, call: Call, request_id: str | None) -> Answer:
        """Accept and echo any model name; `request_id` is the x-override-rid header, which only chats read."""
        rid = (request_id if call.chat else None) or call.rid or uuid4().hex
        return Answer(call, rid, call.model or "default", now_seconds())

    def max_tokens(self, call: Call, prompt: Sequence[int]) -> int:
        limit, given = self._max_model_len, len(prompt)
        if given >= limit:
            message = f"The input ({given} tokens) is longer than the model's context length ({limit} tokens)."
            raise ApiError(400, message)
        if call.max_tokens is not None and given + call.max_tokens > limit:
            message = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {given + call.max_tokens} tokens: {given} tokens from the input messages and "
                f"{call.max_tokens} tokens for the completion. Please reduce the number of tokens in the input "
                "messages or the completion to fit within the limit."
            )
            raise ApiError(400, message)
        return call.max_tokens or limit - given

    def writer(self, answer: Answer) -> StreamWriter:
        return ChatWriter(answer) if answer.call.chat else CompletionWriter(answer)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        call = answer.call
        body = {
            "id": answer.id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [_full_choice(choice, call) for choice in choices],
            "usage": _spelt_out(_usage(*usage_totals(choices, call.n))),
            "metadata": {"weight_version": "default", "weight_versions": [_weights(choices)]},
        }
        return orjson.dumps(body)

    def error(self, error: ApiError) -> bytes:
        """Return a flat error, which names a field only in its message."""
        detail = {"message": error.message, "type": error.kind, "param": None, "code": error.status}
        return orjson.dumps({"object": "error"} | detail)

    def stream_error(self, error: ApiError) -> bytes:
        kind = HTTPStatus(error.status).name
        detail = {"object": "error", "message": error.message, "type": kind, "param": None, "code": error.status}
        return b"data: %b\n\n" % orjson.dumps({"error": detail})


def _weights(choices: Sequence[Choice]) -> dict[str, object]:
    """Return which weights generated which tokens."""
    return {"version": "default", "start": 0, "end": max(choice.completion_tokens for choice in choices)}


def _full_choice(choice: Choice, call: Call) -> dict[str, object]:
    ends = {"logprobs": None, "finish_reason": choice.finish, "matched_stop": _matched_stop(choice)}
    prompt = {"prompt_token_ids": choice.prompt} if call.return_token_ids else {}
    if call.chat:
        message = {"role": "assistant", "content": choice.text, "reasoning_content": None}
        ids = {"response_token_ids": choice.token_ids} if call.return_token_ids else {}
        return {"index": choice.index, "message": message, **ends, **prompt, **ids}
    ids = {"token_ids": choice.token_ids} if call.return_token_ids else {}
    return {"index": choice.index, "text": choice.text, **ends, **ids, **prompt}
