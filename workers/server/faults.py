"""What goes wrong on command: tests of a router arm a fault, and the worker's next calls have it.

`POST /emulated/faults` with {"no_params": 2} arms a fault for two calls; GET returns what is armed.
"""

from collections.abc import Mapping
from typing import Final, Literal, get_args

from workers.api.call import ApiError, whole
from workers.api.http import HttpRequest, Response, json_response
from workers.server.transfer.legs import Leg

COMMANDS: Final = "/emulated/faults"
"""Not a path of any real engine."""

Fault = Literal[
    "no_params",
    "odd_params",
    "expire",
    "refuse",
    "unavailable",
    "fail",
    "die_before",
    "die_during",
    "die_in_stream",
    "die_after",
    "empty_length",
]
FAULTS: Mapping[Fault, str] = {
    "no_params": "a prefill answers 200 without kv_transfer_params",
    "odd_params": "a prefill answers 200 with kv_transfer_params that are no object",
    "expire": "the lease of a prefill ends at once, and its blocks are overwritten",
    "refuse": "a call is answered 400",
    "unavailable": "a call is answered 503",
    "fail": "a call is answered 500",
    "die_before": "the worker ends when a call arrives",
    "die_during": "the worker ends when its engine has a call",
    "die_in_stream": "the worker ends after the first chunk of a stream",
    "die_after": "the worker ends after an answer",
    "empty_length": "a decode answers 200 without a token, and with the finish reason length",
}
assert set(FAULTS) == set(get_args(Fault))


class Faults:
    """Those that are armed, each with the number of calls that will have it."""

    def __init__(self) -> None:
        self._armed: dict[Fault, int] = {}

    def arm(self, fault: Fault, calls: int) -> None:
        """Let the next `calls` calls that can have this fault have it; 0 disarms it."""
        self._armed[fault] = calls

    def take(self, leg: Leg) -> Fault | None:
        """Return the fault of a call that begins now, None if it has none."""
        for fault, calls in self._armed.items():
            if calls and _can_have(leg, fault):
                self._armed[fault] = calls - 1
                return fault
        return None

    def show(self, _request: HttpRequest) -> Response:
        """Answer GET."""
        return json_response({fault: calls for fault, calls in self._armed.items() if calls})

    def command(self, request: HttpRequest) -> Response:
        """Answer POST. Raises ApiError 400 if there is no such fault."""
        body = request.json()
        wanted = [(fault, whole(body[fault], fault)) for fault in FAULTS if fault in body]
        unknown = set(body) - set(FAULTS)
        if unknown:
            raise ApiError(400, f"no fault {', '.join(sorted(unknown))} (known: {', '.join(FAULTS)})")
        for fault, calls in wanted:
            self.arm(fault, calls or 0)
        return self.show(request)


def _can_have(leg: Leg, fault: Fault) -> bool:
    if fault in ("no_params", "odd_params", "expire"):
        return leg.hands_off
    return leg.pulls if fault == "empty_length" else True


def refusal(fault: Fault | None) -> ApiError | None:
    """Return the error with which a call is refused."""
    if fault == "refuse":
        return ApiError(400, "Refused on command.")
    if fault == "unavailable":
        return ApiError(503, "Unavailable on command.", "Service Unavailable")
    if fault == "fail":
        return ApiError(500, "Failed on command.", "InternalServerError")
    return None
