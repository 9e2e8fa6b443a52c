"""Azure's names of paths: a deployment's, which names the model, and those below /openai/v1."""

import re
from typing import Final

import orjson

from router.api.body.error_bodies import load
from router.api.body.json_edit import put_members

PREFIX: Final = "/openai/"
_DEPLOYMENT: Final = re.compile(
    r"/openai/deployments/(.+?)/(chat/completions|completions|embeddings|audio/(?:transcriptions|translations|speech))/?"
)
_VERSION_1: Final = "/openai/v1/"


def without_azure(path: str) -> tuple[str, str | None]:
    """Return OpenAI's name for a path of Azure's, with the model that it names in place of the body.

    Any other path is returned unchanged, and without a model.
    """
    if not path.startswith(PREFIX):
        return path, None
    if found := _DEPLOYMENT.fullmatch(path):
        return f"/v1/{found[2]}", found[1]
    return (path.removeprefix("/openai") if path.startswith(_VERSION_1) else path), None


def with_deployment(body: bytes, deployment: str) -> bytes:
    """Set the model of a JSON object to the deployment of its path; any other body is unchanged.

    A body that names another model would be for a model that the path does not name: the path counts, as at Azure.
    """
    fields = load(body)
    return body if fields is None else put_members(body, {"model": orjson.dumps(deployment)}, fields)
