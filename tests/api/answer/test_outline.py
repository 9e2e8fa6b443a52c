"""What is kept of a long whole answer while it passes."""

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
    """The same, with null for the members that are dropped where they hold more than a number."""
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
def test_the_long_members_are_dropped_and_all_else_is_kept(answer: dict[str, Any], size: int, tight: bool) -> None:
    """However the answer is cut, and whatever its strings look like."""
    data = json.dumps(answer, ensure_ascii=False, separators=(",", ":") if tight else (" , ", " : ")).encode()
    outline = Outline()
    for start in range(0, len(data), size):
        outline.feed(data[start : start + size])
    rest = outline.close()
    assert rest is not None
    assert json.loads(rest) == without(answer)
    assert outline.tail == data


def test_an_answer_of_text_without_end_is_not_kept() -> None:
    """Only its last bytes are, where its usage is."""
    outline = Outline()
    outline.feed(b'{"choices":[{"text":"')
    for _ in range(OUTLINE_BYTES // 2**16 + 2):
        outline.feed(b"x" * 2**16)
    outline.feed(b'"}],"usage":{"prompt_tokens":1}}')
    assert outline.close() is None
    assert outline.tail.endswith(b'"usage":{"prompt_tokens":1}}')
