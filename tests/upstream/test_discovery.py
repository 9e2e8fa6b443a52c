"""Finding workers by DNS name and file: new ones are used, missing ones drained, and errors change nothing."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.config.addresses import WorkerAddress
from router.errors import ConfigError
from router.upstream.discovery.sources import Discovery, DnsSource, FileSource, Workers, read_workers, resolve
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import scripted_engine

SECOND = "127.0.0.9"
"""The address of a second worker. No other test uses it, so that a port which is free at 127.0.0.1 is free there."""


class Names:
    """A resolver whose answers a test sets; `asked` counts the lookups."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | OSError = addresses
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert (host, bool(port)) == ("workers", True)
        self.asked += 1
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


def urls(workers: Workers | None) -> list[str]:
    assert workers is not None
    return [worker.url for worker in workers]


async def test_each_address_of_a_name_is_a_worker() -> None:
    """Each address is one worker at the URL's port, in an order that does not depend on the answer's."""
    source = DnsSource("http://workers:8001", Names("10.0.0.2", "10.0.0.1", "10.0.0.2"))
    found = await source.read()
    assert found == (
        WorkerAddress(url="http://10.0.0.1:8001", id="10.0.0.1:8001"),
        WorkerAddress(url="http://10.0.0.2:8001", id="10.0.0.2:8001"),
    )
    (six,) = await DnsSource("http://workers", Names("fd00::1")).read()
    assert (six.url, six.id) == ("http://[fd00::1]:80", "fd00::1:80")


async def test_a_host_of_two_families_is_one_worker() -> None:
    """The loop's own resolver returns an IP address unchanged, and one address of one family for localhost."""
    assert await resolve("127.0.0.1", 80) == ["127.0.0.1"]
    assert await resolve("localhost", 80) == ["127.0.0.1"]


async def test_a_worker_behind_a_name_is_used_and_drained_when_its_address_is_gone() -> None:
    """A new address is used; one that disappears completes its calls without getting new ones, and can come back."""
    names = Names("127.0.0.1")
    async with scripted_engine() as one, scripted_engine(host=SECOND, port=one.port) as two:
        dns = {"worker_dns": [f"http://workers:{one.port}"], "discovery_interval": 0.02}
        async with running_router(resolve=names, **dns) as router:
            assert await router.get_json("/ready") == {"workers": 1}
            async with router.post(chat()) as first:
                call = await one.call()
                names.addresses = [SECOND]
                await until(lambda: any(backend.healthy for backend in router.directory.endpoints[1:]))
                async with router.post(chat()) as second:
                    await (await two.call()).answer()
                    assert (await second.response()).status == 200
                assert [backend.url for backend in router.directory.endpoints] == [one.url, two.url]
                await call.answer()
                assert (await first.response()).status == 200
            await until(lambda: [backend.url for backend in router.directory.endpoints] == [two.url])
            names.addresses = ["127.0.0.1", SECOND]
            await until(lambda: len(router.directory.endpoints) == 2)


@pytest.mark.one_process("the test reads the router's log")
async def test_an_address_that_is_back_before_its_calls_end_stays(caplog: pytest.LogCaptureFixture) -> None:
    """A flapping DNS name costs no client a call, and the worker is used again."""
    names = Names("127.0.0.1")
    async with scripted_engine() as engine:
        dns = {"worker_dns": [f"http://workers:{engine.port}"], "discovery_interval": 0.02, "log_level": "info"}
        async with running_router(resolve=names, **dns) as router:
            caplog.set_level("INFO")
            async with router.post(chat()) as first:
                call = await engine.call()
                names.addresses = []
                await until(lambda: "is being drained" in caplog.text)
                async with router.post(chat()) as refused:
                    assert (await refused.response()).status == 503
                names.addresses = ["127.0.0.1"]
                (state,) = router.scheduler.fleet
                await until(lambda: not state.left)
                async with router.post(chat()) as second:
                    again = await engine.call()
                    await again.answer()
                    await call.answer()
                    assert (await second.response()).status == 200
                assert (await first.response()).status == 200


@pytest.mark.one_process("the test reads the router's log")
async def test_a_name_that_cannot_be_resolved_keeps_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    """The last resolved addresses stay in use, and the failure is logged once, not once for each attempt."""
    reported: list[list[str]] = []
    names = Names("10.0.0.1")
    source = DnsSource("http://workers:1", names)
    async with Discovery([source], lambda _, workers: reported.append(urls(workers)), 0.001):
        names.addresses = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        asked = names.asked
        await until(lambda: names.asked > asked + 3)
        names.addresses = ["10.0.0.2"]
        await until(lambda: reported[-1] == ["http://10.0.0.2:1"])
    assert {tuple(workers) for workers in reported} == {("http://10.0.0.1:1",), ("http://10.0.0.2:1",)}
    assert caplog.text.count("stay as they were") == 1


async def test_a_file_is_read_when_it_changes_and_refused_when_it_is_wrong(tmp_path: Path) -> None:
    """The workers are those of the last valid file; an empty file, as during a write, is not valid."""
    file = tmp_path / "workers.yaml"
    file.write_text("- http://gpu-1:8000\n- {url: 'http://gpu-2:8000', id: west, api_key: sk-x}\n")
    source = FileSource(file)
    found = await source.read()
    assert urls(found) == ["http://gpu-1:8000", "http://gpu-2:8000"]
    assert found is not None
    assert found[1].id == "west"
    assert await source.read() is None
    for wrong in ("- {url: x, api_key: sk-secret}\n", "", "{", "worker: []\n", "- http://a\n- http://a\n"):
        file.write_text(wrong)
        os.utime(file, ns=(0, len(wrong)))
        with pytest.raises(ConfigError) as refused:
            await source.read()
        assert str(file) in str(refused.value)
        assert "sk-secret" not in str(refused.value)
        assert await source.read() is None
    file.unlink()
    with pytest.raises(ConfigError):
        await source.read()
    file.write_text("[]")
    assert await source.read() == ()


@pytest.mark.one_process("the test reads the router's log")
async def test_the_workers_of_a_file_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Workers of the file serve from the start, one added later also, and an invalid file removes none."""
    file = tmp_path / "workers.yaml"
    async with scripted_engine() as one, scripted_engine() as two:
        file.write_text(f"- {one.url}\n")
        async with running_router(workers_file=file, discovery_interval=0.02) as router:
            assert await router.get_json("/ready") == {"workers": 1}
            file.write_text(f"- {one.url}\n- {two.url}\n")
            await until(lambda: sum(backend.healthy for backend in router.directory.endpoints) == 2)
            file.write_text("- nonsense\n")
            await until(lambda: "stay as they were" in caplog.text)
            assert len(router.directory.endpoints) == 2


def test_a_file_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    """The error is raised at start, as for every other setting."""
    with pytest.raises(ConfigError, match="No such file"):
        read_workers(tmp_path / "none.yaml")
