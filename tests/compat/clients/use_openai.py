"""OpenAI's client. Usage: use_openai.py URL MODEL. Ends with an AssertionError where an answer is wrong."""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

SAY = [{"role": "user", "content": "Tell me of the sea."}]


class Weather(BaseModel):
    """What a random model can write within a schema: one of two words."""

    sky: Literal["clear", "cloudy"]


WEATHER = {
    "type": "function",
    "function": {"name": "report", "strict": True, "parameters": Weather.model_json_schema()},
}


def chat(client: Any, model: str) -> None:
    """A chat reads the same whole, as a stream, and by the stream helper, and its usage counts its tokens."""
    more: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**more, logprobs=True, top_logprobs=3)
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**more, stream=True, **usage)
    text = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 8
    scores = whole.choices[0].logprobs.content
    assert [len(score.top_logprobs) for score in scores] == [3] * 8
    assert all(score.logprob == max(top.logprob for top in score.top_logprobs) for score in scores)
    with client.chat.completions.stream(**more) as stream:
        kinds = {event.type for event in stream}
        assert stream.current_completion_snapshot.choices[0].message.content == text
    assert {"chunk", "content.delta", "content.done"} <= kinds


def parse(client: Any, model: str) -> None:
    """A chat and a response are parsed into the class that was asked for."""
    answer = client.chat.completions.parse(model=model, messages=SAY, response_format=Weather, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    response = client.responses.parse(model=model, input="Hello", text_format=Weather, max_output_tokens=100)
    assert isinstance(response.output_parsed, Weather)


def tools(client: Any, model: str) -> None:
    """The call of a tool has its name and arguments, whole and streamed, and its result can be sent back."""
    more: dict[str, Any] = {"model": model, "tools": [WEATHER], "max_tokens": 300, "seed": 7}
    chosen = {"tool_choice": {"type": "function", "function": {"name": "report"}}}
    message = client.chat.completions.create(**more, messages=SAY, **chosen).choices[0].message
    (called,) = message.tool_calls
    assert called.function.name == "report"
    Weather.model_validate_json(called.function.arguments)
    chunks = client.chat.completions.create(**more, messages=SAY, **chosen, stream=True)
    parts = [part.function for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert [part.name for part in parts if part.name] == ["report"]
    arguments = "".join(part.arguments or "" for part in parts)
    assert json.loads(arguments) == json.loads(called.function.arguments)
    result = {"role": "tool", "tool_call_id": called.id, "content": "noted"}
    turns = [*SAY, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**more, messages=turns).usage.completion_tokens > 0


def responses(client: Any, model: str) -> None:
    """A response continues the one before at the engine that stores it, whole and streamed, and can be fetched."""
    more: dict[str, Any] = {"model": model, "max_output_tokens": 16, "temperature": 0}
    last = client.responses.create(**more, input="Hello")
    for _ in range(6):
        given = last.usage.input_tokens
        last = client.responses.create(**more, input="Go on", previous_response_id=last.id)
        assert last.usage.input_tokens > given, "it reads the turns before"
    assert client.responses.retrieve(last.id).output_text == last.output_text
    with client.responses.stream(**more, input="Go on", previous_response_id=last.id) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert events[-1].response.usage.input_tokens > last.usage.input_tokens


def errors(client: Any, model: str) -> None:
    """A wrong call raises the class of its error."""
    for wrong, expected in (({"model": "nobodys"}, openai.NotFoundError), ({"top_p": 7}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{"model": model, "messages": SAY, **wrong})
        except expected:
            continue
        raise AssertionError(f"{wrong} raises nothing")


def main(url: str, model: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60) as client:
        for use in (chat, parse, tools, responses, errors):
            use(client, model)
        assert [each.id for each in client.models.list()] == [model]


if __name__ == "__main__":
    main(*sys.argv[1:])
