"""TLS: real handshakes with certificates of an authority that the test makes."""

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from router.config.settings import Settings
from router.errors import ConfigError
from router.process.server import build_tls
from router.runtime.tls import Tls
from tests.cli.test_main import PATIENCE, serving
from tests.support.running import emulated_workers


class Authority:
    """A certificate authority, and the files of a server."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.client = ssl.create_default_context()
        self._authority: Any = trustme.CA()
        self._authority.configure_trust(self.client)

    def issue(self, name: str, *, key: bool = True, kind: Any = trustme.KeyType.ECDSA) -> None:
        """Write a certificate for localhost.

        `name`: of its organisation unit; `key`: whether to write its key; `kind`: of the key.
        """
        made = self._authority.issue_cert("localhost", "127.0.0.1", organization_unit_name=name, key_type=kind)
        made.cert_chain_pems[0].write_to_path(self.certificate)
        if key:
            made.private_key_pem.write_to_path(self.key)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("first")
    return made


def unit_of(certificate: Any) -> str:
    """Return the organisation unit of a peer's certificate."""
    names = dict(pair for part in certificate["subject"] for pair in part)
    return str(names["organizationalUnitName"])


@asynccontextmanager
async def server(tls: Tls) -> AsyncIterator[int]:
    """Run a server that closes each connection after its handshake. Yields its port."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await writer.start_tls(tls.context)
        writer.close()

    running = await asyncio.start_server(close, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]


async def presented(port: int, authority: Authority, host: str = "localhost") -> str:
    """Return the unit of the certificate that a server presents to a client that verifies it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.client, server_hostname=host)
    try:
        return unit_of(writer.get_extra_info("peercert"))
    finally:
        writer.close()


async def test_a_new_certificate_counts_without_a_restart(authority: Authority) -> None:
    """Connections after the change get the new certificate; a look without a change does nothing."""
    tls = Tls(authority.certificate, authority.key)
    async with server(tls) as port:
        tls.reload_if_changed()
        assert await presented(port, authority) == "first"
        authority.issue("second")
        assert await presented(port, authority) == "first"
        tls.reload_if_changed()
        assert await presented(port, authority) == "second"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_with_another_kind_of_key_replaces_the_earlier_one(host: str, authority: Authority) -> None:
    """A client gets the new one even if it prefers the kind of the earlier one, whether it names the host or not."""
    tls = Tls(authority.certificate, authority.key)
    async with server(tls) as port:
        for kind in (trustme.KeyType.RSA, trustme.KeyType.ECDSA):
            authority.issue(kind.name, kind=kind)
            tls.reload_if_changed()
            assert await presented(port, authority, host) == kind.name


async def test_a_certificate_without_its_key_changes_nothing(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a change leaves the earlier certificate in use, with a warning; the other half completes it."""
    tls = Tls(authority.certificate, authority.key)
    async with server(tls) as port:
        authority.issue("second", key=False)
        with caplog.at_level(logging.WARNING):
            tls.reload_if_changed()
        assert "the earlier certificate stays in use" in caplog.text
        assert await presented(port, authority) == "first"
        authority.issue("third")
        tls.reload_if_changed()
        assert await presented(port, authority) == "third"


def test_files_that_are_no_certificate_stop_the_start(authority: Authority, tmp_path: Path) -> None:
    """A missing file, one that is no PEM, and a key of another certificate are mistakes of the settings, each told
    apart.
    """
    authority.issue("second", key=False)
    (tmp_path / "text").write_text("no certificate")
    for certificate, said in (
        (tmp_path / "missing", "missing: No such file or directory"),
        (tmp_path / "text", "must be a certificate"),
        (authority.certificate, "does not belong to the certificate"),
    ):
        with pytest.raises(ConfigError, match=f"tls_cert: .*{said}"):
            build_tls(Settings(tls_cert=certificate, tls_key=authority.key))
    assert build_tls(Settings()) is None


@pytest.mark.parametrize("processes", [1, 2])
def test_both_ports_serve_https(processes: int, authority: Authority, tmp_path: Path) -> None:
    """Calls are served at the one port and operators at the other, both by TLS, whole and streamed."""
    files = ["--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)]
    with emulated_workers(1) as (worker,):
        flags = ["--worker", worker, "--admin-port", "0", *files, "--processes", str(processes)]
        with serving(tmp_path, *flags) as router, httpx.Client(verify=authority.client, timeout=PATIENCE) as http:
            admin = router.greeting[1].rpartition(" ")[2]
            assert [url.partition(":")[0] for url in (router.url, admin)] == ["https", "https"]
            while http.get(f"{router.url}/ready").status_code != 200:
                pass
            for stream in (False, True):
                body = {"model": "m", "prompt": "Hello", "max_tokens": 3, "stream": stream}
                answer = http.post(f"{router.url}/v1/completions", json=body)
                assert (answer.status_code, "data: [DONE]" in answer.text) == (200, stream)
            assert "d2lpm_requests_total" in http.get(f"{admin}/metrics").text
            assert http.get(f"{router.url}/metrics").status_code == 404
            assert http.post(f"{admin}/v1/completions", json=body).status_code == 404
            with pytest.raises(httpx.RemoteProtocolError):
                http.get(f"{router.url.replace('https', 'http')}/health")
            router.signal(signal.SIGTERM)
            code, log = router.end()
    assert (code, "Traceback" in log) == (0, False)
