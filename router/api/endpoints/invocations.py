"""POST /invocations (SageMaker): a chat or a completion by its body, and served as such.

vLLM tries each of its endpoints, SGLang takes a chat; the call goes to the endpoint's own path, so that it is charged,
cached and retried as any other chat or completion.
"""

from typing import Final

from router.api.body import fields as read
from router.api.body.call import Call, Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import PromptHasher

PATH: Final = "/invocations"


def parse_invocation(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
    """Parse a body without messages, but with a prompt, as a completion, and any other as a chat. Raises BadRequest."""
    fields = read.load_fields(body)
    parse = parse_completion if "messages" not in fields and "prompt" in fields else parse_chat
    return parse(head, body, hasher, ids=ids)
