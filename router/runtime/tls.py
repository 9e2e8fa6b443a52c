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


class Tls:
    """The TLS context of a server. A new certificate counts for the handshakes that begin after it."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises ConfigError if they are no certificate with its key."""
        self._files = (certificate, key)
        self._versions = self._look()
        try:
            self.context = self._load()
            """What to begin a handshake with: another one once the files have changed."""
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"tls_cert: {certificate} and {key} cannot be used: {error}") from None

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
            log.warning("%s: %s; the earlier certificate stays in use", self._files[0], error)
        else:
            log.info("%s: reloaded", self._files[0])

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # Without a callback, OpenSSL would ask at the terminal for the password of an encrypted key.
        context.load_cert_chain(*self._files, password=lambda: "")
        return context

    def _look(self) -> tuple[FileVersion, FileVersion]:
        return file_version(self._files[0]), file_version(self._files[1])
