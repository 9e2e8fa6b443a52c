"""The two APIs whose calls engines convert to chats: the bodies of their clients and the answers of their engines."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import orjson

SYSTEM = "Be short. " * 100
ASKED: Any = {"role": "user", "content": "Tell me of the sea."}


class Used(NamedTuple):
    """The usage of an answer, in tokens. `extend`: uncached input."""

    extend: int = 4
    cached: int = 5
    output: int = 3


USED = Used()


class ChatApi(ABC):
    """One of the two APIs."""

    path: ClassVar[str]
    start: ClassVar[bytes]
    """Events before the first text."""
    unknown_events: ClassVar[tuple[bytes, ...]]
    """Events that are not part of the answer."""
    charged_after_start: ClassVar[tuple[int | None, int | None]]
    """Extend and cached tokens charged to a client that leaves after `start`; None if the charge is estimated."""
    failures: ClassVar[tuple[bytes, ...]]
    """Events by which an engine reports failure."""

    @abstractmethod
    def ask(self, *turns: Any, **more: object) -> bytes:
        """The body of a call of the user `ann`, with these turns or else one."""

    @abstractmethod
    def system_prompt(self, again: bool) -> dict[str, object]:
        """The system prompt as members of a body. `again`: in the API's other form, if it has one."""

    @abstractmethod
    def answer_turn(self, text: str) -> Any:
        """An answer as a turn in the next call."""

    @abstractmethod
    def delta(self, text: str) -> bytes:
        """An event with a piece of an answer."""

    @abstractmethod
    def end(self, text: str, used: Used = USED) -> list[bytes]:
        """The last events of an answer."""

    @abstractmethod
    def whole(self, text: str, used: Used) -> bytes:
        """An answer that is not streamed."""

    def __str__(self) -> str:
        """The name in test ids."""
        return self.path


class Messages(ChatApi):
    """Anthropic's API."""

    path = "/v1/messages"

    @staticmethod
    def event(kind: str, **fields: object) -> bytes:
        """An event as engines send it."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

    start = event(
        "message_start", message={"id": "a", "role": "assistant", "usage": {"input_tokens": 9, "output_tokens": 0}}
    ) + event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    unknown_events = (b"event: ping\ndata: {}\n\n",)
    charged_after_start = 9, 0
    failures = (event("error", error={"type": "api_error", "message": "died"}),)

    def ask(self, *turns: Any, **more: object) -> bytes:
        fixed = {"model": "m", "max_tokens": 50, "metadata": {"user_id": "ann"}}
        return orjson.dumps({**fixed, "messages": turns or [ASKED], **more})

    def system_prompt(self, again: bool) -> dict[str, object]:
        return {"system": [{"type": "text", "text": SYSTEM}] if again else SYSTEM}

    def answer_turn(self, text: str) -> Any:
        return {"role": "assistant", "content": text}

    def delta(self, text: str) -> bytes:
        return self.event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, text: str, used: Used = USED) -> list[bytes]:  # noqa: ARG002 - only the other API repeats the text
        last = self.event("message_delta", delta={"stop_reason": "end_turn"}, usage=self._usage(used))
        return [last, self.event("message_stop")]

    def whole(self, text: str, used: Used) -> bytes:
        content = [{"type": "text", "text": text}]
        return orjson.dumps({"type": "message", "content": content, "usage": self._usage(used)})

    def _usage(self, used: Used) -> dict[str, object]:
        extend, cached, output = used
        return {"input_tokens": extend, "cache_read_input_tokens": cached, "output_tokens": output}


class Responses(ChatApi):
    """OpenAI's API for responses."""

    path = "/v1/responses"

    @staticmethod
    def event(kind: str, **fields: object) -> bytes:
        """An event as engines send it."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({**fields, "type": kind}))

    start = event("response.created", response={"id": "r", "usage": None}) + event("response.in_progress", response={})
    unknown_events = (event("response.odd"),)
    charged_after_start = None, 0
    failures = (
        event("error", code="server_error", message="died"),
        event("response.failed", response={"error": {"code": "server_error", "message": "died"}}),
        b'data: {"error":{"message":"died","code":500}}\n\n',
    )

    def ask(self, *turns: Any, **more: object) -> bytes:
        return orjson.dumps({"model": "m", "user": "ann", "input": turns or [ASKED], **more})

    def system_prompt(self, again: bool) -> dict[str, object]:  # noqa: ARG002 - this API has only one form
        return {"instructions": SYSTEM}

    def answer_turn(self, text: str) -> Any:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        return {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content}

    def delta(self, text: str) -> bytes:
        return self.event("response.output_text.delta", delta=text, output_index=0)

    def end(self, text: str, used: Used = USED) -> list[bytes]:
        response = {"id": "r", "output": [self.answer_turn(text)], "usage": self._usage(used)}
        return [self.event("response.completed", response=response)]

    def whole(self, text: str, used: Used) -> bytes:
        return orjson.dumps({"object": "response", "output": [self.answer_turn(text)], "usage": self._usage(used)})

    def _usage(self, used: Used) -> dict[str, object]:
        extend, cached, output = used
        input_tokens = extend + cached
        details = {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {"input_tokens": input_tokens, "output_tokens": output, "total_tokens": input_tokens + output, **details}


APIS: tuple[ChatApi, ...] = (Messages(), Responses())
