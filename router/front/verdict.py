"""Decides from an engine's error whether the call, the worker or its load is at fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.api.body.call import Call
from router.api.body.json_object import read_object
from router.api.families import Family, Reader
from router.core.model.events import Fault
from router.core.model.request import Leg
from router.errors import NoWorker, RouterError, UnservedPath, WorkerBroke, WorkerRefused, WorkerUnreachable

UNAVAILABLE: Final = frozenset({429, 503})
"""Statuses of an engine that is full."""
REFUSES_THE_ROUTER: Final = frozenset({401, 402, 403, 407, 408, 421, 426})
"""Statuses about the router's own key, connection or account at the worker. They are not passed on, because the client
would think that its own key is wrong."""
SWITCHED_OFF: Final = "PermissionDeniedError"
"""vLLM's type of the error for a path that one of its flags would switch on."""
NOT_THERE: Final = frozenset({404, 405})
"""Statuses of a worker that lacks the model or the path."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed, and the answer that the client gets unless a retry succeeds."""

    fault: Fault
    accepted: bool
    """Whether the engine may have started to compute."""
    error: RouterError | None = None
    """The error to answer; if None, the engine's own answer below is passed on."""
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""
    """The engine's body; with status 200, the end of its stream."""
    leg: Leg = Leg.WHOLE
    """Which of two calls that were sent at once has failed."""
    retry_elsewhere: bool = False
    """Whether another worker can serve the call although the fault is the call's: this worker is of the wrong kind."""


def fault_of(code: int | str | None) -> Fault:
    """Return the fault for an error code that an engine reports, as a status or inside an answer."""
    if code in UNAVAILABLE:
        return Fault.FULL
    if isinstance(code, int) and code < 500:
        return Fault.CALL
    return Fault.ERROR


def worker_refused(status: int, *, everywhere: bool) -> WorkerRefused | None:
    """Return the error if a status is the worker's own fault; None if the call may be at fault.

    `everywhere`: whether every engine serves the call's path. If so, a worker that lists the model and answers 404 is
    broken. Otherwise 404 is the call's own fault: some engines lack the path, or the stored object is gone.
    """
    workers_own = 300 <= status < 400 or status in REFUSES_THE_ROUTER or (everywhere and status in NOT_THERE)
    return WorkerRefused(status) if workers_own else None


def is_switched_off(status: int, body: bytes) -> bool:
    """Return whether an answer says that the engine has the path but was started without it, as vLLM's scale-out."""
    if status != 403:
        return False
    try:
        error = read_object(body).get("error")
    except WorkerBroke:
        return False
    return isinstance(error, Mapping) and error.get("type") == SWITCHED_OFF


def lacks_path(status: int, body: bytes) -> bool:
    """Return whether an answer says that the engine has no such path, as an embedding engine answers a chat.

    The check looks for the words of the engine's HTTP server, which do not name a model. They do not clear the worker,
    because a broken one may say the same; but if no other worker has the path either, the client gets this reason.
    """
    if status != 404 or len(body) > 1024:
        return False
    try:
        answer = read_object(body)
    except WorkerBroke:
        return False
    error = answer.get("error")
    return "Not Found" in (answer.get("detail"), error.get("message") if isinstance(error, Mapping) else None)


def refusal(
    call: Call, family: Family, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]], *, all_here: bool
) -> FailedAttempt | None:
    """Return the failed attempt if a worker's status is that of an error; else None.

    `body`: the beginning of the answer; `headers`: those for the client; `all_here`: whether that is all of it.
    """
    refused = worker_refused(status, everywhere=family.served_by_all_engines)
    if refused is not None and not (all_here and is_switched_off(status, body)):
        lacks = all_here and lacks_path(status, body)
        error = UnservedPath(call.path, call.model) if lacks else refused
        return FailedAttempt(Fault.ERROR, False, error)
    if 200 <= status < 300:
        return None
    fault = fault_of(status)
    error_body = body if all_here else b""  # part of a body is no JSON
    return FailedAttempt(fault, fault is Fault.ERROR, status=status, headers=headers, body=error_body)


def failure(error: RouterError) -> FailedAttempt:
    """Return the failed attempt of a worker that gave no answer, or no valid one."""
    if isinstance(error, NoWorker):
        return FailedAttempt(Fault.CALL, False, error)
    accepted = not isinstance(error, WorkerUnreachable) or error.accepted
    return FailedAttempt(Fault.BROKEN, accepted, error)


def stream_failure(reader: Reader, headers: Sequence[tuple[bytes, bytes]]) -> FailedAttempt | None:
    """Return why a stream that has ended counts as failed; None if it is complete."""
    if reader.broken and not reader.complete:
        return FailedAttempt(
            Fault.BROKEN, True, WorkerBroke("The worker sent something that is not an answer in its stream.")
        )
    if reader.error is not None:
        fault = fault_of(reader.error.code)
        accepted = reader.started or fault is not Fault.FULL
        return FailedAttempt(Fault.BROKEN if reader.started else fault, accepted, headers=headers, body=reader.held)
    if reader.aborted:
        return FailedAttempt(Fault.ERROR, True, headers=headers, body=reader.held)
    if not reader.finished:
        return FailedAttempt(
            Fault.BROKEN, True, WorkerBroke("The worker ended the stream before the answer was complete.")
        )
    return None
