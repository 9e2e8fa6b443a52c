"""POST /tokenize and /detokenize, and counting the tokens of a message, for which no model runs.

The client is charged for the counted tokens as input. That is more than the work costs, but without a charge any client
could keep the HTTP servers of all engines busy for free.
"""

from typing import Final

from router.api.answer.stream_reader import Answer, read_error
from router.api.body import fields as read
from router.api.body.call import Call, Head
from router.api.body.json_object import load
from router.api.endpoints.plain import plain_call
from router.core.model.prompt_key import PromptHasher, unmatched
from router.core.model.request import Usage

PATHS: Final = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")


def parse_tokenizing(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse a call whose prompt takes no space in a cache. Raises BadRequest."""
    fields = read.load_fields(body)
    tokens = fields.get("tokens")
    prompt = unmatched(len(tokens) if isinstance(tokens, list) else 1)
    return plain_call(head, body, fields, (prompt,), 0, user=read.text(fields, "user"))


def read_tokenized(call: Call, body: bytes) -> Answer:  # noqa: ARG001 - the signature of all readers
    """Read the number of tokens as usage; None if the answer has none, as that of /detokenize."""
    fields = load(body) or {}
    tokens = fields.get("tokens")
    counts = (fields.get("count"), fields.get("input_tokens"), len(tokens) if isinstance(tokens, list) else None)
    count = next((count for count in counts if type(count) is int and count >= 0), None)
    return Answer(None if count is None else Usage(count, 0), (), read_error(fields), False)
