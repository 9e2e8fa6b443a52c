"""SGLang's bootstrap fields: where a prompt is prefilled, and in which room its two legs meet, as of 0.5.23. PURE.

After `sglang/srt/managers/io_struct.py` and `entrypoints/request_headers.py`: the fields may be lists, one entry per
prompt, and headers of chats override them. A single room of a call with several answers stands for consecutive rooms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.api.call import ApiError, Body, whole, wrong_type

DEFAULT_PORT: Final = 8998
OVERRIDDEN_PATH: Final = "/v1/chat/completions"
HEADERS: Final = {f"bootstrap_{name}": f"x-override-bootstrap-{name}" for name in ("host", "port", "room")}


@dataclass(frozen=True, slots=True)
class Room:
    """Where the two legs of one answer meet."""

    host: str
    port: int
    number: int

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Rooms:
    """The fields of one call, as given."""

    hosts: object
    ports: object
    numbers: object

    def first(self) -> int:
        """Return the number of the first room. Raises ApiError 400 if there is none."""
        numbers = self.numbers
        return _number(numbers[0] if isinstance(numbers, list) and numbers else numbers)

    def of(self, answers: int) -> list[Room]:
        """Return a room for each answer. Raises ApiError 400 if there is none, or not as many as answers."""
        return [
            Room(str(host or "127.0.0.1"), whole(port, "bootstrap_port") or DEFAULT_PORT, _number(number))
            for host, port, number in zip(
                _each(self.hosts, answers), _each(self.ports, answers), _numbers(self.numbers, answers), strict=True
            )
        ]


def rooms(body: Body, headers: Mapping[str, str], path: str) -> Rooms:
    """Return the fields of a call."""
    overriding = headers if path == OVERRIDDEN_PATH else {}
    hosts, ports, numbers = (overriding.get(header, body.get(field)) for field, header in HEADERS.items())
    return Rooms(hosts, ports, numbers)


def prefill_rank(body: Body) -> int | None:
    """Return the rank of the prefill engine that a decode leg names."""
    return whole(body.get("disagg_prefill_dp_rank"), "disagg_prefill_dp_rank")


def _numbers(given: object, answers: int) -> list[object]:
    if isinstance(given, list) or answers == 1:
        return _each(given, answers)
    first = _number(given)
    return [first + index for index in range(answers)]


def _each(given: object, answers: int) -> list[object]:
    if not isinstance(given, list):
        return [given] * answers
    if answers % max(1, len(given)):
        raise wrong_type("bootstrap_room", "one entry per prompt")
    return [entry for entry in given for _ in range(answers // len(given))]


def _number(given: object) -> int:
    number = whole(given, "bootstrap_room")
    if number is None:
        raise ApiError(400, "Invalid request: Disaggregated request received without bootstrap room id.", "BadRequest")
    return number
