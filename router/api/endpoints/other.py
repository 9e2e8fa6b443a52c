"""Any other path of an engine: handed on as it came, and charged by the usage that its answer tells, in any shape.

A `stream` in the body means what the engine takes it for: whether the answer is a stream, its own type tells.

Where the answer tells none, its client pays for an estimate of its input: a token for every four bytes of JSON, or for
every 512 of anything else, as audio is; at least for one. The model is that of the JSON body or the form; where that
names none, any.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from router.api.body import fields as read
from router.api.body.call import Call, Head, Storage
from router.api.body.checks import largest_id
from router.api.body.fields import Fields
from router.api.body.multipart import form_fields, is_form
from router.core.model.prompt_key import PromptHasher, unmatched

SAFE_IN_PATH: Final = "/:@!$&'()*+,;=~"
SAFE_IN_QUERY: Final = SAFE_IN_PATH + "?%"
"""What needs no quoting; a percent sign of a query quotes something already."""
JSON_BYTES_PER_TOKEN: Final = 4
FILE_BYTES_PER_TOKEN: Final = 512
"""Of compressed audio, at 25 KB and 50 tokens a second."""
OUTPUT_LIMIT_MEMBERS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def parse_other(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001 - Parser
    """Read what the router has to know, and leave the rest to the engine. Raises BadRequest for what cannot be read."""
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
    """Those of a JSON object; none where the body is empty or another JSON value."""
    fields = read.load_json(body) if body else None
    return fields if isinstance(fields, dict) else {}


def request_target(head: Head) -> str:
    """Path and query as they go into a request line."""
    path = quote(head.path, safe=SAFE_IN_PATH)
    return f"{path}?{quote(head.query, safe=SAFE_IN_QUERY)}" if head.query else path
