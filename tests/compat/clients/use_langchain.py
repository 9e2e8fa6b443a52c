"""LangChain's client of OpenAI. Usage: use_langchain.py URL MODEL. Ends with an AssertionError if one is wrong."""

import asyncio
import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found, unused-ignore]
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of today."""

    sky: Literal["clear", "cloudy"]


def chat(model: Any) -> None:
    """A chat reads the same whole, as a stream, and in a batch, with its usage."""
    whole = model.invoke("Tell me of the sea.")
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(model.stream("Tell me of the sea.", stream_usage=True))
    assert "".join(part.content for part in parts) == whole.content
    used = sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts)
    assert used == whole.usage_metadata["output_tokens"]
    several = asyncio.run(model.abatch(["Tell me of the sea."] * 4))
    assert [each.content for each in several] == [whole.content] * 4


def structured(model: Any) -> None:
    """An answer is parsed into a class, by a schema and by a tool."""
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Weather, method=method, strict=True).invoke("How is the weather?")
        assert isinstance(answer, Weather), method


def main(url: str, name: str) -> None:
    more: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "key", "max_retries": 0, "timeout": 60}
    chat(ChatOpenAI(model=name, max_tokens=20, temperature=0, **more))
    structured(ChatOpenAI(model=name, max_tokens=300, seed=7, **more))


if __name__ == "__main__":
    main(*sys.argv[1:])
