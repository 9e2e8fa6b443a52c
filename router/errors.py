"""All errors of the router, sorted by whose fault they are.

    RouterError                  answered to the client: an HTTP status and an OpenAI error object
    ├── ClientError              the client's fault: the same call fails again
    │   ├── BadRequest           400
    │   ├── BodyTooLarge         413
    │   ├── TooManyMembers       413, JSON that is too large once it is parsed
    │   ├── UrlTooLong           414
    │   ├── UnsupportedEncoding  415, a packed body
    │   ├── HeadTooLarge         431
    │   ├── TooSlow              408, a request that is not complete in time
    │   ├── UnknownPath          404
    │   ├── MethodNotAllowed     405
    │   ├── UnknownModel         404, code model_not_found
    │   ├── UnservedPath         404, no worker of the model has the path
    │   ├── UnknownRequest       404, not among the recent requests that are remembered
    │   ├── UnknownResponse      404, not stored, or not for this client
    │   ├── UnknownWorker        404
    │   ├── UnknownClient        404
    │   ├── WorkerExists         409
    │   ├── ClientBusy           409
    │   ├── NoReplica            409, no other replica of a cluster waits to lead
    │   ├── Unauthorized         401, not the operator's key
    │   ├── InvalidKey           401, not the key of a client
    │   ├── ModelNotAllowed      403, not a model that the client may call
    │   └── HostNotAllowed       403, addressed to a host name that is not this router's
    ├── CapacityError            the fleet's state: the same call may succeed later
    │   ├── Refused              429, waited too long, or the queue is full, or a limit is reached
    │   ├── NoWorker             503, no worker can serve it, or the router has no connection left
    │   ├── NoRoom               503, the bytes held for all clients together are at their limit
    │   └── ShuttingDown         503, the router is shutting down; the connection is closed
    └── WorkerError              a worker's fault
        ├── WorkerUnreachable    502, before any answer; `accepted` is True if the engine may have begun to compute
        ├── WorkerBroke          502, died during an answer or sent an invalid one
        ├── WorkerRefused        502, rejects the router's calls, or lacks a model that it lists
        └── WorkerHung           504, sent nothing for too long
    ConfigError                  the operator's fault: one line on the terminal, no HTTP

Messages reach clients: they name parameters and worker ids, never keys, addresses or prompt text.
"""

import math
from typing import ClassVar


class RouterError(Exception):
    """A call that cannot be answered as asked."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    """OpenAI's error type, which client libraries show."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """Seconds; None if unknown."""
        self.reason = reason

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that belong to this error, in ASGI's form."""
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.reason is not None:
            headers.append((b"x-d2lpm-dropped-reason", self.reason.encode()))
        return headers


class ClientError(RouterError):
    status = 400
    type = "invalid_request_error"


class BadRequest(ClientError):
    pass


class BodyTooLarge(ClientError):
    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes.", code="body_too_large")


class UnsupportedEncoding(ClientError):
    status = 415

    def __init__(self) -> None:
        super().__init__("The body must be sent without a content-encoding.", code="unsupported_encoding")


class TooManyMembers(ClientError):
    status = 413

    def __init__(self) -> None:
        super().__init__("The body has too many JSON members.", code="body_too_large")


class UrlTooLong(ClientError):
    status = 414

    def __init__(self, limit: int) -> None:
        super().__init__(f"The URL is longer than {limit} bytes.", code="url_too_long")


class HeadTooLarge(ClientError):
    status = 431

    def __init__(self, limit: int) -> None:
        super().__init__(f"The headers are larger than {limit} bytes.", code="headers_too_large")


class TooSlow(ClientError):
    status = 408

    def __init__(self, part: str) -> None:
        super().__init__(f"The {part} of the request did not arrive in time.", code="request_timeout")


class UnknownPath(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, path: str) -> None:
        super().__init__(f"There is no path {path[:200]}.", code="unknown_path")


class MethodNotAllowed(ClientError):
    status = 405

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed here; use {allowed}.", code="method_not_allowed")
        self.allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", self.allowed.encode())]


class UnknownModel(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model[:200]}` does not exist.", param="model", code="model_not_found")


class UnservedPath(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, path: str, model: str) -> None:
        message = f"The workers of the model `{model[:200]}` do not serve {path[:200]}: it cannot be called that way."
        super().__init__(message, param="model", code="path_not_served")


class UnknownRequest(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, request: str) -> None:
        super().__init__(f"The request `{request[:200]}` is unknown or too old.", code="unknown_request")


class UnknownResponse(ClientError):
    """Has the message of the engines' own error."""

    status = 404

    def __init__(self, response: str) -> None:
        message = f"Response with id '{response[:256]}' not found."
        super().__init__(message, param="response_id", code=404)


class UnknownWorker(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, worker: str) -> None:
        super().__init__(f"There is no worker `{worker[:200]}`.", code="unknown_worker")


class UnknownClient(ClientError):
    status = 404
    type = "not_found_error"

    def __init__(self, client: str) -> None:
        super().__init__(f"The client `{client[:200]}` is unknown.", code="unknown_client")


class NoReplica(ClientError):
    status = 409

    def __init__(self) -> None:
        super().__init__("No other replica of the cluster waits to lead.", code="no_replica")


class ClientBusy(ClientError):
    status = 409

    def __init__(self, client: str) -> None:
        super().__init__(f"The client `{client[:200]}` has requests in flight.", code="client_busy")


class WorkerExists(ClientError):
    status = 409

    def __init__(self, worker: str) -> None:
        super().__init__(f"A worker `{worker}` exists already.", code="worker_exists")


class Unauthorized(ClientError):
    status = 401
    type = "authentication_error"

    def __init__(self) -> None:
        super().__init__("This path needs the operator's key as a bearer token.", code="invalid_admin_key")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class InvalidKey(ClientError):
    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class ModelNotAllowed(ClientError):
    status = 403
    type = "permission_error"

    def __init__(self, model: str) -> None:
        message = f"You are not allowed to call the model `{model[:200]}`."
        super().__init__(message, param="model", code="model_not_allowed")


class HostNotAllowed(ClientError):
    status = 403
    type = "permission_error"

    def __init__(self, host: str) -> None:
        message = f"The router is not known as `{host[:200]}`; its operator can add that name with --allowed-hosts."
        super().__init__(message, code="host_not_allowed")


class CapacityError(RouterError):
    status = 503


class Refused(CapacityError):
    status = 429
    type = "rate_limit_error"


class NoWorker(CapacityError):
    pass


class NoRoom(CapacityError):
    def __init__(self) -> None:
        message = "The requests in flight have reached the memory limit; try again later."
        super().__init__(message, retry_after=1, reason="rejected-memory")


class ShuttingDown(CapacityError):
    def __init__(self) -> None:
        message = "The router is shutting down; another router may serve the call."
        super().__init__(message, retry_after=1, reason="rejected-shutting-down")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"connection", b"close")]


class WorkerError(RouterError):
    status = 502


class WorkerUnreachable(WorkerError):
    def __init__(self, message: str, *, accepted: bool, unconnected: OSError | None = None) -> None:
        super().__init__(message, code="worker_unreachable")
        self.accepted = accepted
        """True if the engine may have begun to compute; if False, another worker can be tried without risk."""
        self.unconnected = unconnected
        """Why no connection could be opened; None if one was. Not `__cause__`, which compiled code does not set."""


class WorkerBroke(WorkerError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code="worker_broke")


class WorkerRefused(WorkerError):
    def __init__(self, status: int) -> None:
        super().__init__(f"The worker refused the call with status {status}.", code="worker_refused")


class WorkerHung(WorkerError):
    status = 504

    def __init__(self) -> None:
        super().__init__("The worker sent nothing for too long.", code="worker_timeout")


class ConfigError(Exception):
    """An invalid setting; its text is one line for the operator."""
