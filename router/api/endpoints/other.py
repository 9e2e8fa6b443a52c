"""All other paths of an engine: calls are forwarded unchanged and charged by the usage in the answer, in any shape.

The router does not interpret `stream` in the body: the content type of the answer shows whether it is a stream.

If the answer has no usage, its client is charged for an estimate of its input: one token per 4 bytes of JSON, or per
512 bytes of anything else, such as audio; at least one token. The model is the one that the JSON body or the form
names; if it names none, any model may serve the call.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from router.api.body import fields as read
from router.api.body.call import Call, Head, Storage
from router.api.body.fields import Fields, largest_id
from router.api.body.multipart import form_fields, is_form
from router.core.model.prompt_key import PromptHasher, unmatched

SAFE_IN_PATH: Final = "/:@!$&'()*+,;=~"
SAFE_IN_QUERY: Final = SAFE_IN_PATH + "?%"
"""Characters that need no quoting. A percent sign in a query is part of a quoted character already."""
JSON_BYTES_PER_TOKEN: Final = 4
FILE_BYTES_PER_TOKEN: Final = 512
"""Bytes of compressed audio per token, at 25 KB and 50 tokens per second."""
OUTPUT_LIMIT_MEMBERS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def parse_other(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001 - Parser
    """Parse the members that the router needs, and leave the others to the engine. Raises BadRequest."""
    form = is_form(head.content_type)
    fields: Mapping[str, Any] = form_fields(body, head.content_type) if form else _members(body)
    model, user = fields.get("model"), fields.get("user")
    if model is not None and not isinstance(model, str):
        raise read.wrong_type("model", "a string")
    limits = [limit for name in OUTPUT_LIMIT_MEMBERS if type(limit := fields.get(name)) is int and limit >= 0]
    per_token = JSON_BYTES_PER_TOKEN if fields and not form else FILE_BYTES_PER_TOKEN
    return Call(
        path=request_target(head),
        body=body,
        model=model or "",
        streamed=None,
        prompts=(unmatched(len(body) // per_token),),
        output_limit=max(limits, default=None) if head.method == "POST" else 0,
        user=_text(user),
        usage_wanted=True,
        continuous_wanted=True,
        method=head.method,
        content_type=head.content_type,
        adapters=read.adapters(fields),
        largest_id=largest_id(fields),
        storage=Storage(previous_id=_text(fields.get("previous_response_id"))),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _members(body: bytes) -> Fields:
    """Return the members of a JSON object; empty if the body is empty or another JSON value."""
    fields = read.load_json(body) if body else None
    return fields if isinstance(fields, dict) else {}


def request_target(head: Head) -> str:
    """Path and query, quoted for a request line."""
    path = quote(head.path, safe=SAFE_IN_PATH)
    return f"{path}?{quote(head.query, safe=SAFE_IN_QUERY)}" if head.query else path
