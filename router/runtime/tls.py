"""The certificate for clients' connections, read again when its files change."""

import logging
import ssl
from pathlib import Path
from typing import Final

from router.errors import ConfigError
from router.runtime.atomic_file import FileVersion, file_version

log = logging.getLogger(__name__)

CHECK_TICKS: Final = 10
"""Ticks of the server, 0.1 s each, between two looks at the files."""


def why(error: OSError) -> str:
    """Return what is wrong with a file, in one line that names it."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Load a certificate and its key. Raises OSError, whose text says in plain words what is wrong."""
    for path in (certificate, key):
        path.open("rb").close()  # OpenSSL's own error does not name the file that cannot be read
    try:
        # Without a callback, OpenSSL would ask at the terminal for the password of an encrypted key.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OSError(f"the key in {key} does not belong to the certificate in {certificate}") from None
        raise OSError(f"{certificate} must be a certificate and {key} its key without a password, both PEM") from None


class Tls:
    """The TLS context of a server. A new certificate counts for the handshakes that begin after it."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises ConfigError if they are no certificate with its key."""
        self._files = (certificate, key)
        self._versions = self._look()
        try:
            self.context = self._load()
            """What to begin a handshake with: another one once the files have changed."""
        except OSError as error:
            raise ConfigError(f"tls_cert: {why(error)}") from None

    def reload_if_changed(self) -> None:
        """Read the files again if one has changed. If they do not fit each other, the earlier certificate stays."""
        if (versions := self._look()) == self._versions:
            return
        self._versions = versions
        try:
            # Not into the context in use: a failure would leave half of it there, and a certificate with another kind
            # of key would stand beside the earlier one.
            self.context = self._load()
        except OSError as error:
            log.warning("tls_cert: %s; the earlier certificate stays in use", why(error))
        else:
            log.info("%s: reloaded", self._files[0])

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        load_certificate(context, *self._files)
        return context

    def _look(self) -> tuple[FileVersion, FileVersion]:
        return file_version(self._files[0]), file_version(self._files[1])
