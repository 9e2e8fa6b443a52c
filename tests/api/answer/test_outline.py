"""The outline that is kept of a long answer while it passes through."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.outline import DROPPED_MEMBERS, OUTLINE_BYTES, Outline

TEXT = st.text(st.sampled_from('ab"\\{}[],:\n é') | st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT | st.sampled_from([f'"{name}":[' for name in DROPPED_MEMBERS])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.sampled_from(DROPPED_MEMBERS), inner, max_size=4)
    ),
    max_leaves=20,
)


def without(value: Any) -> Any:
    """The value with null for the members that the outline leaves out; those that are numbers stay."""
    if isinstance(value, list):
        return [without(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: None if name in DROPPED_MEMBERS and isinstance(each, list | dict | str) else without(each)
        for name, each in value.items()
    }


@given(
    st.dictionaries(st.sampled_from(["choices", "usage", *DROPPED_MEMBERS]), VALUES), st.integers(1, 9), st.booleans()
)
def test_only_the_long_members_are_left_out(answer: dict[str, Any], size: int, tight: bool) -> None:
    """The outline does not depend on the blocks of the answer or on its strings."""
    data = json.dumps(answer, ensure_ascii=False, separators=(",", ":") if tight else (" , ", " : ")).encode()
    outline = Outline()
    for start in range(0, len(data), size):
        outline.feed(data[start : start + size])
    rest = outline.close()
    assert rest is not None
    assert json.loads(rest) == without(answer)
    assert outline.tail == data


def test_an_outline_that_is_too_long_is_not_kept() -> None:
    """Only the last bytes of the answer are kept, which contain its usage."""
    outline = Outline()
    outline.feed(b'{"choices":[{"text":"')
    for _ in range(OUTLINE_BYTES // 2**16 + 2):
        outline.feed(b"x" * 2**16)
    outline.feed(b'"}],"usage":{"prompt_tokens":1}}')
    assert outline.close() is None
    assert outline.tail.endswith(b'"usage":{"prompt_tokens":1}}')
