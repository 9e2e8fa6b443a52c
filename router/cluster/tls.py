"""TLS between fronts and leader: both sides show a certificate of the cluster's own authority.

It begins after both have proven that they know the secret (`handshake`), so whoever does not never reaches it.
"""

import ssl
from pathlib import Path
from typing import Final, NamedTuple

from router.config.settings import Settings
from router.errors import ConfigError
from router.runtime.tls import load_certificate, why

NAME: Final = "replica"
"""What a front asks the leader for. It is not compared with the leader's certificate, which is valid at any address:
the authority is to sign replicas of this cluster only."""


class ClusterTls(NamedTuple):
    """The files of one replica. They are read for each connection, so a renewed certificate counts from the next on."""

    cert: Path
    """PEM file with its certificate, and those that lead to the authority's."""
    key: Path
    """PEM file with the private key of that."""
    ca: Path
    """PEM file with the certificate of the authority."""

    def check(self) -> None:
        """Raise ConfigError if the files cannot be used."""
        try:
            self.server()
        except OSError as error:
            raise ConfigError(f"cluster_tls_cert: {why(error)}") from None

    def server(self) -> ssl.SSLContext:
        """Return the leader's side. Raises OSError."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """Return a front's side. Raises OSError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        self.ca.open("rb").close()  # OpenSSL's own error does not name the file that cannot be read
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError:
            raise OSError(f"{self.ca} must be a certificate, as PEM") from None
        load_certificate(context, self.cert, self.key)
        return context


def cluster_tls(settings: Settings) -> ClusterTls | None:
    """Return the TLS between replicas; None if what they tell each other is not encrypted. Raises ConfigError."""
    if settings.cluster_tls_cert is None or settings.cluster_tls_key is None or settings.cluster_tls_ca is None:
        return None
    tls = ClusterTls(settings.cluster_tls_cert, settings.cluster_tls_key, settings.cluster_tls_ca)
    tls.check()
    return tls
