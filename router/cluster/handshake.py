"""How two replicas prove to each other that they know the secret of the cluster, before anything else is sent.

The server sends a nonce; the client answers with what it wants, a nonce of its own, and an HMAC of all that under the
secret; the server answers with another HMAC. Neither side can be made to answer for the other, because the two HMACs
begin with different words. What follows is encrypted only with TLS (`tls`): without it, the network between machines
must be one that only the cluster's own can listen to.
"""

import asyncio
import hashlib
import hmac
import os
import socket
from enum import Enum
from pathlib import Path
from typing import Final

from router.errors import ConfigError

NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
HANDSHAKE_SECONDS: Final = 5.0
"""Seconds in which the other side must prove that it knows the secret."""
LEAST_SECRET_BYTES: Final = 16


class Purpose(Enum):
    """What a connection to the leader is for; the value is one byte."""

    CHANNEL = b"c"
    """A front's channel."""
    CONTROL = b"h"
    """A call to the control plane, by HTTP."""


class Untrusted(OSError):
    """The other side does not know the secret."""


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without white space around it. Raises ConfigError if it is not usable."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cluster_secret_file: {path}: {error.strerror}") from None
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(f"cluster_secret_file: {path} has fewer than {LEAST_SECRET_BYTES} bytes")
    return secret


def hash_secret(secret: bytes) -> bytes:
    """Return the key of the prompt hashes that all replicas of a cluster derive from its secret."""
    return hmac.digest(secret, b"prompt hashes", hashlib.sha256)


async def prove(connection: socket.socket, secret: bytes, purpose: Purpose) -> None:
    """Prove to a server that this side knows the secret, and have it do the same. Raises OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        asked = await _receive(connection, NONCE_BYTES)
        said = purpose.value + os.urandom(NONCE_BYTES)
        await loop.sock_sendall(connection, said + _mac(secret, b"front", asked, said))
        answer = await _receive(connection, MAC_BYTES)
    if not hmac.compare_digest(answer, _mac(secret, b"leader", asked, said)):
        raise Untrusted("the leader has another secret")


async def admit(connection: socket.socket, secret: bytes) -> Purpose:
    """Have a client prove that it knows the secret, and do the same. Returns what it wants. Raises OSError."""
    loop = asyncio.get_running_loop()
    asked = os.urandom(NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        await loop.sock_sendall(connection, asked)
        said = await _receive(connection, 1 + NONCE_BYTES)
        answer = await _receive(connection, MAC_BYTES)
        if not hmac.compare_digest(answer, _mac(secret, b"front", asked, said)):
            raise Untrusted("a client has another secret")
        try:
            purpose = Purpose(said[:1])
        except ValueError:
            raise Untrusted("a client wants what this version does not know") from None
        await loop.sock_sendall(connection, _mac(secret, b"leader", asked, said))
    return purpose


def _mac(secret: bytes, side: bytes, asked: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + asked + said, hashlib.sha256)


async def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes, as later ones do not belong to the handshake."""
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < count:
        block = await loop.sock_recv(connection, count - len(received))
        if not block:
            raise ConnectionError("the other side has closed the connection")
        received += block
    return received
