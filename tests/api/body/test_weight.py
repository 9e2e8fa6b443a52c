"""Bodies that take many times their size once parsed."""

import json

import pytest

from router.api.body.fields import check_weight
from router.errors import TooManyMembers

SIZE = 15 * 2**20


@pytest.mark.parametrize("member", [b'{"":0}', b"[]", b"{}", b"1", b'""'])
def test_a_body_of_many_small_members_is_rejected(member: bytes) -> None:
    """The kind of the members does not matter."""
    body = b'{"junk":[' + member + (b"," + member) * (SIZE // (len(member) + 1)) + b"]}"
    with pytest.raises(TooManyMembers):
        check_weight(body)


@pytest.mark.parametrize(
    "content", ["x" * SIZE, '{"a":1,"b":[]},' * (SIZE // 20), "0,1\n" * (SIZE // 5)], ids=["text", "json", "csv"]
)
def test_the_contents_of_a_string_do_not_count(content: str) -> None:
    """Code and data in a prompt are one string."""
    check_weight(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())


def test_a_prompt_of_a_million_token_ids_is_accepted() -> None:
    """Numbers weigh little: such a prompt is large and not hostile."""
    check_weight(json.dumps({"prompt": list(range(1_000_000))}).encode())
