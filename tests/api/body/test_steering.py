"""Fields by which a call would choose its rank are found and removed, however they are written."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.body.steering import RANK_FIELDS, refuse_steering, steering_fields, without_steering
from router.errors import BadRequest

VALUES = st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2))


def spelled(name: str, escaped: set[int]) -> str:
    """Return a name as JSON, with the characters at these places escaped."""
    return '"' + "".join(f"\\u{ord(each):04x}" if at in escaped else each for at, each in enumerate(name)) + '"'


@given(
    st.lists(
        st.tuples(st.sampled_from([*RANK_FIELDS, "model", "prompt", "_rank"]), st.sets(st.integers(0, 20)), VALUES),
        max_size=6,
    ),
    st.sampled_from([b"", b" ", b"\n\t"]),
)
def test_no_spelling_of_a_field_gets_through(members: list[tuple[str, set[int], object]], space: bytes) -> None:
    """What remains are the other members, each with its last value."""
    parts = [spelled(name, escaped).encode() + b":" + space + orjson.dumps(value) for name, escaped, value in members]
    body = b"{" + space + b",".join(parts) + b"}"
    rest = {name: value for name, _, value in members if name not in RANK_FIELDS}
    assert orjson.loads(without_steering(body)) == rest
    assert set(steering_fields(body)) == {name for name, *_ in members} & set(RANK_FIELDS)


@pytest.mark.parametrize(
    "body",
    [b'{"model":"m","prompt":"the data_parallel_rank is \\u0041"}', b'{"a":{"routed_dp_rank":1}}', b"no JSON", b"[]"],
)
def test_a_body_without_such_a_field_stays_as_it_is(body: bytes) -> None:
    """Not a byte changes, whatever its texts and inner objects contain."""
    assert without_steering(body) is body
    refuse_steering(body)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_extra_arguments_cannot_carry_parameters(name: str) -> None:
    """They are removed if they have any, and stay otherwise."""
    other = b'{"model":"m","vllm_xargs":{"mine":1}}'
    assert without_steering(other) is other
    assert without_steering(b'{"model":"m","vllm_xargs":{"%b":["x"]}}' % name.encode()) == b'{"model":"m"}'


def test_a_refusal_names_the_field() -> None:
    """The error's parameter is the field."""
    with pytest.raises(BadRequest) as refusal:
        refuse_steering(b'{"routed_dp_rank":null}')
    assert refusal.value.param == "routed_dp_rank"
