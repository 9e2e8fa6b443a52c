"""LiteLLM's client. Usage: use_litellm.py URL MODEL. Ends with an AssertionError where an answer is wrong."""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import fetches a list of prices

import litellm  # type: ignore[import-not-found, unused-ignore]

SAY = [{"role": "user", "content": "Tell me of the sea."}]
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "cloudy"]}}, "required": ["sky"]}
TOOL = {"type": "function", "function": {"name": "report", "strict": True, "parameters": SCHEMA}}


def chat(base: dict[str, Any]) -> None:
    """A chat reads the same whole and streamed."""
    more = {"messages": SAY, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**base, **more)
    chunks = list(litellm.completion(**base, **more, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8


def tools(base: dict[str, Any]) -> None:
    """The call of a tool has its name and arguments."""
    choice = {"type": "function", "function": {"name": "report"}}
    answer = litellm.completion(**base, messages=SAY, tools=[TOOL], tool_choice=choice, max_tokens=100)
    (called,) = answer.choices[0].message.tool_calls
    assert called.function.name == "report"
    assert json.loads(called.function.arguments)["sky"] in ("clear", "cloudy")


def responses(base: dict[str, Any]) -> None:
    """A response continues the one before."""
    first = litellm.responses(**base, input="Hello", max_output_tokens=16)
    second = litellm.responses(**base, input="Go on", previous_response_id=first.id, max_output_tokens=16)
    assert second.usage.input_tokens > first.usage.input_tokens


def messages(base: dict[str, Any]) -> None:
    """Anthropic's call of LiteLLM is answered in Anthropic's words."""
    rooted = {**base, "api_base": base["api_base"].removesuffix("/v1"), "model": f"anthropic/{base['model'][7:]}"}
    answer = asyncio.run(litellm.anthropic.messages.acreate(**rooted, messages=SAY, max_tokens=8))
    assert answer["usage"]["output_tokens"] == 8


def errors(base: dict[str, Any]) -> None:
    """A model that nobody serves raises LiteLLM's error for it."""
    try:
        litellm.completion(**{**base, "model": "openai/nobodys"}, messages=SAY)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model raises nothing")


def main(url: str, name: str) -> None:
    litellm.suppress_debug_info = True
    base = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "key", "max_retries": 0}
    for use in (chat, tools, responses, messages, errors):
        use(base)


if __name__ == "__main__":
    main(*sys.argv[1:])
