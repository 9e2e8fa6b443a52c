"""Who reaches the paths that are for operators: at which port, and with which key."""

import logging
from collections.abc import Mapping
from hmac import compare_digest
from typing import Any, Final

from pydantic import SecretStr

from router.config.addresses import is_loopback
from router.config.settings import Settings
from router.errors import HostNotAllowed, Unauthorized, UnknownPath
from router.front.http.http_errors import without_port

log = logging.getLogger(__name__)

OPERATOR_PATHS: Final = frozenset(
    {"metrics", "fairness", "sessions", "explain", "workers", "clients", "config", "cluster", "usage", "ui"}
)
"""The first parts of the paths that say something of all clients or workers, or change them."""


PAGE: Final = "ui"
PAGE_DATA: Final = frozenset({"events", "history", "clients"})
"""The paths of the live page that show something. Its files hold nothing of the router, and ask for the key."""


def needs_key(path: str) -> bool:
    """Return whether the key is needed for an operators' path, if any is needed at all."""
    first, _, rest = path.lstrip("/").partition("/")
    return first != PAGE or rest.strip("/") in PAGE_DATA


def is_for_operators(path: str) -> bool:
    """Return whether a path is for operators, not for clients."""
    return path.lstrip("/").partition("/")[0] in OPERATOR_PATHS


def has_key(headers: Mapping[bytes, bytes], key: SecretStr) -> bool:
    """Return whether a call has this key as its bearer token. Takes the same time for every wrong one."""
    expected = f"Bearer {key.get_secret_value()}".encode()
    return compare_digest(headers.get(b"authorization", b""), expected)


class OperatorAccess:
    """Decides which calls of the control plane are served.

    With a port of their own, operators' paths exist there and nowhere else. Without one, on an address that others can
    reach, they need the operator's key.
    """

    def __init__(self, settings: Settings) -> None:
        self.port: Final = settings.admin_port
        """The operators' own port; None if they have none."""
        self._hosts = settings.host_names(settings.admin_host)
        """The names in a Host header at the operators' port; None for any."""
        self._key = settings.admin_key
        self._needs_key = self.port is None and not is_loopback(settings.host)
        if self._needs_key and self._key is None:
            log.warning(
                "nobody can read /metrics or /fairness: on %s they need --admin-key or --admin-port",
                settings.host,
            )

    def is_operators_port(self, scope: Mapping[str, Any]) -> bool:
        """Return whether a call came in at a port that is for operators alone."""
        return self.port is not None and scope["server"][1] == self.port

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise UnknownPath if the path of a call does not exist at its port, Unauthorized if it lacks the key, and
        HostNotAllowed at the operators' port if a web page could have made the call under a name of its own.
        """
        path = scope["path"]
        if not is_for_operators(path):
            return
        if self.port is not None and not self.is_operators_port(scope):
            raise UnknownPath(path)
        if self.port is not None and self._hosts is not None:
            host = dict(scope["headers"]).get(b"host", b"")
            if host and without_port(host) not in self._hosts:
                raise HostNotAllowed(host.decode("latin-1"))
        if (
            self._needs_key
            and needs_key(path)
            and (self._key is None or not has_key(dict(scope["headers"]), self._key))
        ):
            raise Unauthorized


def admin_api_is_open(settings: Settings) -> bool:
    """Return whether to serve the admin API: only with a key, and on an address that others can reach only at a port of
    its own or with --admin-on-public.
    """
    address = settings.admin_host or settings.host
    if settings.admin_key is None or settings.admin_on_public or settings.admin_port is not None:
        return settings.admin_key is not None
    if is_loopback(address):
        return True
    log.warning("the admin API is not served on %s without --admin-port or --admin-on-public", settings.host)
    return False
