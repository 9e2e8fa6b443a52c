"""A load balancer before the replicas, with the configuration that `docs/clusters.md` shows."""

import asyncio
import contextlib
import os
import re
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Final

from tests.chaos.processes import until
from tests.cluster.replicas.environment import library_path, program
from tests.deploy.environment import ROOT

DOCUMENT: Final = ROOT / "docs" / "clusters.md"
REPLICA: Final = re.compile(r"10\.0\.0\.\d+:8000")
"""A replica's address in the document."""
LISTENS: Final[dict[str, str]] = {"nginx": "listen 80;", "haproxy": "bind :80"}
"""Where the configurations in the document listen."""


def documented(name: str) -> str:
    """Return the configuration of nginx or HAProxy in the document."""
    (found,) = re.findall(rf"```{name}\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    return str(found)


def configuration(name: str, replicas: Sequence[str], port: int, folder: Path) -> str:
    """Return the documented configuration, for these replicas and this port. `folder`: for what nginx writes."""
    addresses = iter(replicas)
    own = REPLICA.sub(lambda _: next(addresses), documented(name))
    assert next(addresses, None) is None, "the document shows as many replicas"
    assert LISTENS[name] in own
    listens = LISTENS[name].replace(":80", f"127.0.0.1:{port}").replace(" 80", f" 127.0.0.1:{port}")
    own = own.replace(LISTENS[name], listens)
    if name == "haproxy":
        return own
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    head = f"daemon off; pid {folder / 'pid'}; error_log stderr; events {{ }}"
    return f"{head}\nhttp {{ access_log off; {folders}\n{own}}}\n"


@contextlib.asynccontextmanager
async def load_balancer(name: str, replicas: Sequence[str], port: int, folder: Path) -> AsyncIterator[str]:
    """Run nginx or HAProxy before the replicas at these addresses. Returns its URL."""
    binary = program((name,))
    assert binary is not None, "`make test-cluster` gets it"
    file = folder / f"{name}.conf"
    file.write_text(configuration(name, replicas, port, folder))
    flags = ["-p", str(folder), "-c", str(file)] if name == "nginx" else ["-db", "-f", str(file)]
    with (folder / f"{name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            binary, *flags, stdout=log, stderr=log, env={**os.environ, **library_path()}
        )
    try:
        await until(partial(_listens, port, process))
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(SIGTERM)
        await process.wait()


async def _listens(port: int, process: Process) -> bool:
    assert process.returncode is None, "it has ended: its log says why"
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
