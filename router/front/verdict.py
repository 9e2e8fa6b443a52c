"""Decides from an engine's error whether the call, the worker or its load is at fault."""

from collections.abc import Mapping
from typing import Final

from router.api.body.json_object import read_object
from router.core.model.events import Fault
from router.errors import WorkerBroke, WorkerRefused

UNAVAILABLE: Final = frozenset({429, 503})
"""Statuses of an engine that is full."""
REFUSES_THE_ROUTER: Final = frozenset({401, 402, 403, 407, 408, 421, 426})
"""Statuses about the router's own key, connection or account at the worker. They are not passed on, because the client
would think that its own key is wrong."""
SWITCHED_OFF: Final = "PermissionDeniedError"
"""vLLM's type of the error for a path that one of its flags would switch on."""
NOT_THERE: Final = frozenset({404, 405})
"""Statuses of a worker that lacks the model or the path."""


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
