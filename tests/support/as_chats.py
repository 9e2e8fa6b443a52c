"""The two APIs whose calls engines turn into chats, as their clients and engines speak them."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import orjson

SYSTEM = "Be short. " * 100
ASKED: Any = {"role": "user", "content": "Tell me of the sea."}


class Used(NamedTuple):
    """What an answer says that it used, in tokens."""

    extend: int = 4
    cached: int = 5
    output: int = 3


USED = Used()


class ChatApi(ABC):
    """One of them."""

    path: ClassVar[str]
    start: ClassVar[bytes]
    """Events before the first word."""
    unknown_events: ClassVar[tuple[bytes, ...]]
    """Events that say nothing of the answer."""
    charged_after_start: ClassVar[tuple[int | None, int | None]]
    """Extend and cached tokens that a client pays for who leaves after that; None for what is estimated."""
    failures: ClassVar[tuple[bytes, ...]]
    """Events by which an engine gives up."""

    @abstractmethod
    def ask(self, *turns: Any, **more: object) -> bytes:
        """The body of a call, of the user `ann`; of one turn where none is given."""

    @abstractmethod
    def system_prompt(self, again: bool) -> dict[str, object]:
        """The system prompt as members of a body; `again`: in another form, if there is one."""

    @abstractmethod
    def answer_turn(self, text: str) -> Any:
        """An answer as the next turn has it."""

    @abstractmethod
    def delta(self, text: str) -> bytes:
        """An event with more of an answer."""

    @abstractmethod
    def end(self, text: str, used: Used = USED) -> list[bytes]:
        """The last events of an answer."""

    @abstractmethod
    def whole(self, text: str, used: Used) -> bytes:
        """An answer in one piece."""

    def __str__(self) -> str:
        """For the names of tests."""
        return self.path


class Messages(ChatApi):
    """Anthropic's."""

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

    def end(self, text: str, used: Used = USED) -> list[bytes]:  # noqa: ARG002 - the other API repeats it
        last = self.event("message_delta", delta={"stop_reason": "end_turn"}, usage=self._usage(used))
        return [last, self.event("message_stop")]

    def whole(self, text: str, used: Used) -> bytes:
        content = [{"type": "text", "text": text}]
        return orjson.dumps({"type": "message", "content": content, "usage": self._usage(used)})

    def _usage(self, used: Used) -> dict[str, object]:
        extend, cached, output = used
        return {"input_tokens": extend, "cache_read_input_tokens": cached, "output_tokens": output}


class Responses(ChatApi):
    """OpenAI's."""

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

    def system_prompt(self, again: bool) -> dict[str, object]:  # noqa: ARG002 - it has one form alone
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
        given = extend + cached
        details = {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {"input_tokens": given, "output_tokens": output, "total_tokens": given + output, **details}


APIS: tuple[ChatApi, ...] = (Messages(), Responses())
