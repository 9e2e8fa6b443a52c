"""Calls a server through LiteLLM's client and prints the results as JSON. Runs in LiteLLM's own environment.

Usage: speak.py URL MODEL [FAMILY...]. The families are the functions below; the default is all of them.
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import fetches a list of prices

import litellm  # type: ignore[import-not-found]

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


def rooted(base: dict[str, Any], provider: str) -> dict[str, Any]:
    """Return the arguments that name the same server to kinds of call that append the whole path themselves."""
    model = base["model"].replace("openai/", f"{provider}/")
    return {"model": model, "api_base": base["api_base"].removesuffix("/v1"), "api_key": base["api_key"]}


def chat(base: dict[str, Any]) -> dict[str, Any]:
    more = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**base, **more)
    parts = list(litellm.completion(**base, **more, stream=True))
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


def rerank(base: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = litellm.rerank(**rooted(base, "hosted_vllm"), query="where", documents=["here", "there"])
    except litellm.NotFoundError as error:  # LiteLLM posts to /rerank, which not every engine has
        return {"rerank": error.status_code}
    return {"rerank": sorted(result["index"] for result in answer.results)}


def responses(base: dict[str, Any]) -> dict[str, Any]:
    more = {"input": "Hi", "max_output_tokens": 8}
    whole = litellm.responses(**base, **more)
    events = litellm.responses(**base, **more, stream=True)
    kinds = [str(getattr(event.type, "value", event.type)) for event in events]
    return {"response": [whole.usage.input_tokens, whole.usage.output_tokens], "response events": [kinds[0], kinds[-1]]}


def messages(base: dict[str, Any]) -> dict[str, Any]:
    asked = litellm.anthropic.messages.acreate(**rooted(base, "anthropic"), messages=MESSAGES, max_tokens=8)
    answer = asyncio.run(asked)
    return {"message": [answer["content"][0]["type"], answer["usage"]["output_tokens"]]}


def refused(base: dict[str, Any]) -> dict[str, Any]:
    try:
        litellm.completion(**{**base, "model": "openai/nobodys"}, messages=MESSAGES)
    except litellm.NotFoundError as error:
        return {"unknown model": error.status_code}
    return {"unknown model": None}


FAMILIES = {each.__name__: each for each in (chat, text, embeddings, rerank, responses, messages, refused)}


def main(url: str, name: str, *families: str) -> None:
    litellm.suppress_debug_info = True
    base = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "key", "max_retries": 0}
    results: dict[str, Any] = {}
    for family in families or FAMILIES:
        results |= FAMILIES[family](base)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
