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
    """An answer is parsed into a class in each mode, whole and in parts."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)
    more: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": 300, "seed": 7, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        asked = instructor.from_openai(client, mode=mode).chat.completions
        answer = asked.create(response_model=Weather, **more)
        assert isinstance(answer, Weather), mode
        parts = list(asked.create_partial(response_model=Weather, **more))
        assert parts[-1].sky in ("clear", "cloudy"), mode


if __name__ == "__main__":
    main(*sys.argv[1:])
