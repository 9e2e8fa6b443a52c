"""Instructor over OpenAI's client. Usage: use_instructor.py URL MODEL. Ends with an AssertionError if one is wrong."""

import sys
from typing import Any, Literal

import instructor  # type: ignore[import-not-found, unused-ignore]
import openai
from pydantic import BaseModel

SAY: list[Any] = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """The weather of today."""

    sky: Literal["clear", "cloudy"]


def main(url: str, model: str) -> None:
    """An answer is parsed into a class, whole and in parts."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)
    more: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": 300, "seed": 7, "max_retries": 0}
    # Its modes of tools do not say `strict`, without which vLLM lets a model write any JSON.
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    assert isinstance(asked.create(response_model=Weather, **more), Weather)
    *_, last = asked.create_partial(response_model=Weather, **more)
    assert last.sky in ("clear", "cloudy")


if __name__ == "__main__":
    main(*sys.argv[1:])
