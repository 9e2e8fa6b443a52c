"""Anthropic's client. Usage: use_anthropic.py URL MODEL. Ends with an AssertionError where an answer is wrong."""

import sys
from typing import Any

import anthropic  # type: ignore[import-not-found, unused-ignore]

SAY = [{"role": "user", "content": "Tell me of the sea."}]
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "cloudy"]}}, "required": ["sky"]}
TOOL = {"name": "report", "description": "Report the weather.", "strict": True, "input_schema": SCHEMA}


def messages(client: Any, model: str) -> None:
    """A message reads the same whole and by the stream helper."""
    more: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**more, system="Be brief.")
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 8
    with client.messages.stream(**more, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 8


def tools(client: Any, model: str) -> None:
    """The call of a tool has its name and arguments."""
    choice = {"type": "tool", "name": "report"}
    answer = client.messages.create(model=model, messages=SAY, max_tokens=100, tools=[TOOL], tool_choice=choice)
    (used,) = [block for block in answer.content if block.type == "tool_use"]
    assert used.name == "report"
    assert used.input["sky"] in ("clear", "cloudy")


def count(client: Any, model: str) -> None:
    """Tokens are counted without a call to the model."""
    assert client.messages.count_tokens(model=model, messages=SAY).input_tokens > 0


def errors(client: Any, model: str) -> None:
    """A wrong call raises the class of its error."""
    for wrong, expected in (
        ({"model": "nobodys"}, anthropic.NotFoundError),
        ({"messages": 7}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{"model": model, "messages": SAY, "max_tokens": 8, **wrong})
        except expected:
            continue
        raise AssertionError(f"{wrong} raises nothing")


def main(url: str, model: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=60) as client:
        for use in (messages, tools, count, errors):
            use(client, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
