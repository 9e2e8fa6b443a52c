"""Makes nearly valid inputs from seeds: parts are changed, moved, cut or repeated."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

MAX_BYTES: Final = 1 << 16
"""Bytes of an input at most."""
VALUES: Final[Sequence[Any]] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "m", "abort", "stop", "error", "é\U0001f600", "\ud800", "\0", '"\\', "²"),
    *("9" * 5000, "x" * 300, [], {}, [[]], [{}], [1], ["x"], [None], {"": {}}, {"type": "text", "text": "x"}),
)
DEEP: Final = 300
"""Levels of a deep value: more than orjson serialises, fewer than it parses."""
DEEPEST: Final = b"[" * 1010 + b"]" * 1010
"""Nearly as deep as orjson parses, and deeper than Python serialises or shows."""
_DEEPEST: Final = "nested as deeply as can be"
"""Placeholder for `DEEPEST`, replaced in the serialised text."""


def deep_equal(one: Any, other: Any) -> bool:
    """Whether two parsed values are equal, without recursion."""
    pairs = [(one, other)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other) or (isinstance(one, dict | list) and len(one) != len(other)):
            return False
        if isinstance(one, list):
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[name], other[name]) for name in one]
        elif one != other:
            return False
    return True


class Mutator:
    """Mutates seeds. Equal random generators give equal mutations."""

    def __init__(self, random: Random, tokens: Sequence[bytes], names: Sequence[str] = ()) -> None:
        """`tokens`: bytes that the reader searches for; `names`: members of objects that it reads."""
        self.random = random
        self._tokens = tokens
        self._names = names or ("x",)

    def damaged(self, seed: bytes) -> bytes:
        """Make one to four changes of bytes."""
        data = bytearray(seed)
        for _ in range(self.random.randint(1, 4)):
            self.random.choice(_CHANGES)(self, data)
        return bytes(data[:MAX_BYTES])

    def tree(self, value: Any) -> Any:
        """Return a copy with one to three members or items changed."""
        for _ in range(self.random.randint(1, 3)):
            value = self._changed(value)
        return value

    def json(self, value: Any) -> bytes:
        """Serialise a value with random spacing. Values that JSON does not have are written as Python does."""
        spaced = None if self.random.random() < 0.5 else (",", ":")
        text = json.dumps(value, ensure_ascii=self.random.random() < 0.5, separators=spaced)
        return text.encode(errors="surrogatepass").replace(b'"%b"' % _DEEPEST.encode(), DEEPEST)

    def cuts(self, data: bytes) -> list[bytes]:
        """Cut the bytes into a few pieces, some of them empty."""
        places = sorted(self.random.randint(0, len(data)) for _ in range(self.random.randint(0, 6)))
        return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]

    def value(self) -> Any:
        """A random value."""
        if self.random.random() < 0.02:
            deep: Any = []
            for _ in range(DEEP):
                deep = [deep]
            return self.random.choice((deep, _DEEPEST))
        return self.random.choice(VALUES)

    def _changed(self, value: Any) -> Any:
        if value and self.random.random() < 0.9:
            if isinstance(value, dict):
                return self._changed_object(value)
            if isinstance(value, list):
                return self._changed_list(value)
        return self.value()

    def _changed_object(self, value: dict[Any, Any]) -> dict[Any, Any]:
        name, other = self.random.choice(list(value)), self.random.choice(self._names)
        match self.random.randrange(8):
            case 0:
                return {each: value[each] for each in value if each != name}
            case 1:
                return {**value, other: self.value()}
            case 2:
                return {**value, other: value[name]}
        return {**value, name: self._changed(value[name])}

    def _changed_list(self, value: list[Any]) -> list[Any]:
        at = self.random.randrange(len(value))
        match self.random.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at : at + 1] * self.random.randint(2, 4) + value[at + 1 :]
        return [*value[:at], self._changed(value[at]), *value[at + 1 :]]

    def _span(self, data: bytearray) -> tuple[int, int]:
        start = self.random.randint(0, len(data))
        return start, min(len(data), start + self.random.choice((1, 1, 2, 4, 16, 64)))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _overwrite(self, data: bytearray) -> None:
        start, end = self._span(data)
        data[start:end] = self.random.randbytes(end - start)

    def _insert(self, data: bytearray) -> None:
        start, _ = self._span(data)
        data[start:start] = self.random.choice(self._tokens)

    def _replace(self, data: bytearray) -> None:
        start, end = self._span(data)
        data[start:end] = self.random.choice(self._tokens)

    def _delete(self, data: bytearray) -> None:
        start, end = self._span(data)
        del data[start:end]

    def _repeat(self, data: bytearray) -> None:
        start, end = self._span(data)
        times = self.random.choice((2, 3, 10)) if self.random.random() < 0.98 else 5000
        data[start:end] = (data[start:end] * times)[:MAX_BYTES]

    def _move(self, data: bytearray) -> None:
        start, end = self._span(data)
        moved = data[start:end]
        del data[start:end]
        to = self.random.randint(0, len(data))
        data[to:to] = moved

    def _truncate(self, data: bytearray) -> None:
        del data[self.random.randint(0, len(data)) :]


_CHANGES: Final[Sequence[Callable[[Mutator, bytearray], None]]] = (
    *(Mutator._flip, Mutator._overwrite, Mutator._insert, Mutator._insert, Mutator._replace),
    *(Mutator._delete, Mutator._repeat, Mutator._move, Mutator._truncate),
)
