"""Calls a server as a program does that uses LiteLLM, and prints what it was told. Run by LiteLLM's own environment.

Usage: speak.py URL MODEL
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices when it is imported

import litellm  # type: ignore[import-not-found]

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


def chat(base: dict[str, Any]) -> dict[str, Any]:
    whole = litellm.completion(**base, messages=MESSAGES, max_tokens=8)
    parts = list(litellm.completion(**base, messages=MESSAGES, max_tokens=8, stream=True))
    return {
        "chat": [whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "chat stream": "".join(part.choices[0].delta.content or "" for part in parts),
    }


def text(base: dict[str, Any]) -> dict[str, Any]:
    model = base["model"].replace("openai/", "text-completion-openai/")
    whole = litellm.text_completion(**{**base, "model": model}, prompt="Once upon a time", max_tokens=8)
    return {"text": [whole.choices[0].text, whole.usage.prompt_tokens, whole.usage.completion_tokens]}


def embeddings(base: dict[str, Any]) -> dict[str, Any]:
    answer = litellm.embedding(**base, input=["one", "two"], encoding_format="float")
    return {"embeddings": [len(answer.data), answer.usage.prompt_tokens]}


def rerank(url: str, name: str) -> dict[str, Any]:
    answer = litellm.rerank(
        model=f"hosted_vllm/{name}", api_base=url, api_key="key", query="where", documents=["here", "there"]
    )
    return {"rerank": sorted(result["index"] for result in answer.results)}


def responses(base: dict[str, Any]) -> dict[str, Any]:
    whole = litellm.responses(**base, input="Hi", max_output_tokens=8)
    kinds = [
        str(getattr(event.type, "value", event.type)) for event in litellm.responses(**base, input="Hi", stream=True)
    ]
    return {"response": [whole.usage.input_tokens, whole.usage.output_tokens], "response events": [kinds[0], kinds[-1]]}


async def messages(url: str, name: str) -> dict[str, Any]:
    answer = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{name}", api_base=url, api_key="key", messages=MESSAGES, max_tokens=8
    )
    return {"message": [answer["content"][0]["type"], answer["usage"]["output_tokens"]]}


def refused(base: dict[str, Any]) -> dict[str, Any]:
    try:
        litellm.completion(**{**base, "model": "openai/nobodys"}, messages=MESSAGES)
    except litellm.NotFoundError as error:
        return {"unknown model": error.status_code}
    return {"unknown model": None}


def main(url: str, name: str) -> None:
    litellm.suppress_debug_info = True
    base = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "key", "max_retries": 0}
    told = {**chat(base), **text(base), **embeddings(base), **rerank(url, name), **responses(base), **refused(base)}
    print(json.dumps({**told, **asyncio.run(messages(url, name))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
